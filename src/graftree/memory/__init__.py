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
# - `keeping.py`: which values `nnx.remat` keeps, by names and modules; `nnx.name`.
# - `reports.py`: what a function keeps for its gradient, by the paths of modules.
#
# The public names are in the table below. A file is imported when a name of it is first
# used; `keeping` with nnx, for `nnx.name`.

from __future__ import annotations

import typing

from graftree import lazy_names

# For each file its public names. Type checkers read imports, below the table.
PUBLIC: dict[str, str] = {
    "accumulation": "value_and_grad",
    "keeping": "offload save",
    "reports": "SavedReport SavedValue saved",
}

if typing.TYPE_CHECKING:
    from graftree.memory.accumulation import value_and_grad as value_and_grad
    from graftree.memory.keeping import offload as offload
    from graftree.memory.keeping import save as save
    from graftree.memory.reports import SavedReport as SavedReport
    from graftree.memory.reports import SavedValue as SavedValue
    from graftree.memory.reports import saved as saved


__getattr__, __dir__ = lazy_names.functions_of(__name__, PUBLIC)
