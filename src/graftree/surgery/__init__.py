"""Changes models in place: freezes, replaces and adapts their parts.

    nnx.surgery.freeze(model, where="encoder")                # out of training
    nnx.surgery.replace(model, "head", nnx.Linear(64, 5, rngs=rngs))
    nnx.surgery.add_lora(model, "**.{query,value}", rank=8, rngs=rngs)
    nnx.surgery.merge_lora(model)                             # into the kernels
    nnx.surgery.quantize(model, nnx.Linear, "int4")           # out of training too

Select parts by a pattern of paths, a class or a function; a selection that matches
nothing is an error. Everything is checked before the first change. `stack` and
`unstack` turn a list of equal layers into an `nnx.Stack` and back; `at` turns a pattern
into a filter.
"""

# The files of this folder:
#
# - `selections.py`: selects parts of a model, by path, class or predicate.
# - `frozen_variables.py`: parameters taken out of training, and back.
# - `replacements.py`: sub-modules replaced by others; lists of equal layers as one
#   `Stack`, and back.
# - `stacks.py`: `Stack`, equal layers by one loop, which is in `stack_loops.py`;
#   `equal_layers.py`: whether layers are equal.
# - `adaptations.py`: LoRA onto layers, into their kernels, or off again;
#   `lora_layers.py`: the layers that can have it; `lora_targets.py`: these,
#   and Params of other modules, with their new Variables.
# - `quantized_params.py`: kernels in 8 or 4 bits, by qwix, and back.

from graftree import namespaces
from graftree.surgery.adaptations import (
    add_lora as add_lora,
    merge_lora as merge_lora,
    remove_lora as remove_lora,
)
from graftree.surgery.frozen_variables import (
    Frozen as Frozen,
    freeze as freeze,
    unfreeze as unfreeze,
)
from graftree.surgery.quantized_params import (
    dequantize as dequantize,
    quantize as quantize,
)
from graftree.surgery.replacements import (
    replace as replace,
    stack as stack,
    unstack as unstack,
)
from graftree.surgery.selections import at as at

__dir__ = namespaces.lister(__name__)
