"""Reads and writes weights as PyTorch and Hugging Face store them.

    print(nnx.weights.draft("model.safetensors", model))    # a first version of:
    mapping = nnx.weights.Mapping({"fc1": "up", "fc2": "down"})
    nnx.weights.load("model.safetensors", model, mapping)
    nnx.weights.save("copy.safetensors", model, mapping)

A `Mapping` pairs the tensors of a file with the arrays of a model, and their axes, in
both directions. All tensors and all arrays must be accounted for, or an error lists
those that are left. `load_adapter` and `save_adapter` handle LoRA adapters of PEFT.
``python -m graftree.weights convert model.pt`` turns a PyTorch file into safetensors.
"""

# The files of this folder:
#
# - `loading.py`: a file into a model, each device its part; `saving.py`: a model into
#   files, whole or not at all; `drafts.py`: a table to begin with; `adapters.py`: LoRA
#   as PEFT has it, with the layers and parameters in `adapter_layers.py`.
# - `tables.py`: the table, and its use on a model; `layouts.py`: the axes of a
#   tensor, as in `"o i -> i o"`; `torch_layouts.py`: how PyTorch stores our layers.
# - `sources.py`: the source at a path; `.npz` files; arrays of NumPy, JAX or PyTorch.
# - `block_scales.py`: MXFP4 and float8 with scales by block, decoded while read.
# - `tensor_files.py`: safetensors files, checked, and indexes of several.
# - `stored_tensors.py`: a tensor in a file, the bytes of its slices, and a `Source` of
#   them; an open file, and its format if it is another one.
# - `__main__.py`, `torch_files.py`: a file of `torch.save` as a safetensors file.

from graftree import namespaces
from graftree.weights.adapters import (
    load_adapter as load_adapter,
    save_adapter as save_adapter,
)
from graftree.weights.drafts import Draft as Draft, draft as draft
from graftree.weights.loading import load as load
from graftree.weights.saving import save as save
from graftree.weights.tables import Mapping as Mapping

__dir__ = namespaces.lister(__name__)
