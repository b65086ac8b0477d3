"""Mixtures of experts: each token goes to a few of many experts.

    router = nnx.Router(64, 8, top_k=2, rngs=rngs)
    layer = nnx.MixtureOfExperts(router, nnx.GatedExperts(8, 64, 128, rngs=rngs))
    y, loads = nnx.capture(layer, nnx.RouterLoad)(x)
    loss = task_loss(y) + 0.01 * nnx.mixtures.load_balance_loss(loads)

The layers are in the flat namespace; here are what a router returns, its losses, and
activations.
"""

# The files of this folder:
#
# - `routers.py`: which experts a token goes to; losses that keep their use even
# - `experts.py`: layers with Params stacked by expert, called with sorted rows
# - `layers.py`: the layer: tokens sorted to experts, and back; experts on many devices

from graftree import namespaces
from graftree.nn.mixtures.experts import (
    clamped_swiglu as clamped_swiglu,
    swiglu as swiglu,
)
from graftree.nn.mixtures.routers import (
    Load as Load,
    Routing as Routing,
    expert_shares as expert_shares,
    load_balance_loss as load_balance_loss,
    total_load as total_load,
    z_loss as z_loss,
)

__dir__ = namespaces.lister(__name__)
