"""Inspects models and compiled functions while they run.

    nnx.debugging.find_nans(loss_fn)(model, x)       # where a NaN or infinity arises
    nnx.debugging.explain_recompile(train_step)      # why it was compiled again
    with nnx.debugging.at_most_traces(train_step, 1):
        ...                                          # fails if it is
    with nnx.debugging.intercept(model, nnx.Linear, f):
        model(x)                                     # f sees the outputs of each Linear
    with nnx.debugging.disable_caches():
        model(x)                                     # is it a stale cache?

    @nnx.debugging.named                             # a method known by its name
    def encode(self, x): ...

`nnx.tabulate(model, x)` is a table of its layers, `nnx.display(model)` draws it in a
notebook; `full_repr` and `display_to_html` give all of it as text and as a file.
"""

# The files of this folder:
#
# - `nans.py`: where a non-finite value arises; `nan_search.py` runs a program operation
#   by operation and looks at the numbers.
# - `module_calls.py`: methods known by their names; outputs of modules, seen or
#   replaced; the calls of a model, and the cost of each.
# - `summaries.py`: `nnx.tabulate`; `outlines.py` describes values and objects.
# - `displays.py`: objects in notebooks and HTML files, and as text.
# - `recompiles.py`: why a compiled function was traced again, and how traces differ;
#   `traces.py` records them.
# - `lost_updates.py`: the warning for writes under a transform of JAX itself.

import graftree.debugging.lost_updates as _lost_updates  # noqa: F401 it reports itself
from graftree import namespaces
from graftree.config import disable_caches as disable_caches
from graftree.debugging.displays import (
    display_to_html as display_to_html,
    full_repr as full_repr,
)
from graftree.debugging.module_calls import intercept as intercept, named as named
from graftree.debugging.nans import NanReport as NanReport, find_nans as find_nans
from graftree.debugging.recompiles import (
    Explanation as Explanation,
    at_most_traces as at_most_traces,
    explain_recompile as explain_recompile,
)

__dir__ = namespaces.lister(__name__)
