"""Trains with less memory.

    loss, grads = nnx.memory.value_and_grad(loss_fn, 4)(model, x)   # in four parts
    apply = nnx.remat(Block.__call__, policy=nnx.memory.save("mlp"))
    print(nnx.memory.saved(loss_fn, model, x))      # what a gradient keeps, and where

`save` and `offload` select values by the names that `nnx.name` gave them, or modules by
their paths; ``|`` combines them.
"""

# The files of this folder:
#
# - `accumulation.py`: gradients of a batch, computed part by part.
# - `keeping.py`: the values that `nnx.remat` keeps, by names and modules; `nnx.name`.
# - `reports.py`: the values that a function keeps for its gradient, by module path.

from graftree import namespaces
from graftree.memory.accumulation import value_and_grad as value_and_grad
from graftree.memory.keeping import offload as offload, save as save
from graftree.memory.reports import (
    SavedReport as SavedReport,
    SavedValue as SavedValue,
    saved as saved,
)

__dir__ = namespaces.lister(__name__)
