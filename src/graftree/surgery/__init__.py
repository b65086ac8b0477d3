"""Changes models in place: freezes, replaces and adapts their parts.

    nnx.surgery.freeze(model, where="encoder")                # out of training
    nnx.surgery.replace(model, "head", nnx.Linear(64, 5, rngs=rngs))
    nnx.surgery.add_lora(model, "**.{query,value}", rank=8, rngs=rngs)
    nnx.surgery.merge_lora(model)                             # into the kernels

What is meant is said by a pattern of paths, a class or a function; what matches nothing
is an error. Everything is checked before the first change. `stack` and `unstack` turn a
list of equal layers into an `nnx.Stack` and back; `at` makes a filter of a pattern.
"""

# The files of this folder:
#
# - `selections.py`: which parts of a model are meant, by path, class or predicate.
# - `frozen_variables.py`: parameters taken out of training, and back.
# - `replacements.py`: sub-modules replaced by others.
# - `stacks.py`: `Stack`, equal layers by one loop, which is in `stack_loops.py`.
# - `stacking.py`: lists of equal layers as one `Stack`, and back.
# - `adaptations.py`: LoRA onto layers; `adaptable_layers.py`: onto which;
#   `lora_layers.py`: what they are then; `factors.py`: their new Variables.
# - `merges.py`: LoRA into the kernels, or off.
#
# The public names are in the table below, and nothing is imported before one is used.

from __future__ import annotations

import typing

from graftree import lazy_names

# For each file its public names. Type checkers read imports, below the table.
PUBLIC: dict[str, str] = {
    "adaptations": "add_lora",
    "merges": "merge_lora remove_lora",
    "frozen_variables": "Frozen freeze unfreeze",
    "replacements": "replace",
    "selections": "at",
    "stacking": "stack unstack",
}

if typing.TYPE_CHECKING:
    from graftree.surgery.adaptations import add_lora as add_lora
    from graftree.surgery.frozen_variables import Frozen as Frozen
    from graftree.surgery.frozen_variables import freeze as freeze
    from graftree.surgery.frozen_variables import unfreeze as unfreeze
    from graftree.surgery.merges import merge_lora as merge_lora
    from graftree.surgery.merges import remove_lora as remove_lora
    from graftree.surgery.replacements import replace as replace
    from graftree.surgery.selections import at as at
    from graftree.surgery.stacking import stack as stack
    from graftree.surgery.stacking import unstack as unstack


__getattr__, __dir__ = lazy_names.functions_of(__name__, PUBLIC)
