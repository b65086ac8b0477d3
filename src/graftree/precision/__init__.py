"""Sets the dtypes of a whole model: parameters, arithmetic and results.

    nnx.precision.set_policy(model, "params=f32, compute=bf16, output=f32")
    with nnx.precision.default("params=f32, compute=bf16"):
        model = Net(nnx.Rngs(0))                    # the same, for layers being made
    nnx.precision.compute_dtype(model)              # the dtype for a cache
    print(nnx.precision.report(forward, model, x))  # which dtypes its operations have

`DynamicScale` scales the loss where gradients are in float16.
"""

# The files of this folder:
#
# - `dtype_policies.py`: the dtypes of parameters, arithmetic and results.
# - `models.py`: sets a policy in a model, or in the layers that are made in a context;
#   its effect on one layer, and a list of the changes.
# - `dynamic_scales.py`: the scale of a loss whose gradients are in float16.
# - `dtype_reports.py`: the dtypes of the operations of a program.
#
# `compute_dtype` is in `nn/compute_dtypes.py`: layers ask it too.

from graftree import namespaces
from graftree.nn.compute_dtypes import compute_dtype as compute_dtype
from graftree.precision.dtype_policies import Policy as Policy
from graftree.precision.dtype_reports import (
    DtypeReport as DtypeReport,
    report as report,
)
from graftree.precision.dynamic_scales import DynamicScale as DynamicScale
from graftree.precision.models import default as default, set_policy as set_policy

__dir__ = namespaces.lister(__name__)
