"""Weights of other libraries: the public sub-module `nnx.weights`.

What a file says of its tensors is checked before a tensor is read, and of the data only
the slices that are asked for are read.

- ``stored_tensors.py``: a tensor in a file, and a `Source` of such; ``sources.py``: the
  source at a path.
- ``tensor_files.py``: one safetensors file; ``headers.py``: its header, checked;
  ``stored_dtypes.py``: the names of dtypes there.
- ``indexes.py``: a set of such files with an index.
- ``archives.py``: ``.npz`` files; ``array_mappings.py``: arrays of NumPy, JAX or
  PyTorch by name.
- ``writing.py``: safetensors files, whole or not at all.
- ``slices.py``: which bytes a slice of a tensor has; ``open_files.py``: reads those.

The public names are in the table below, and nothing is imported before one is used.
"""

from __future__ import annotations

from graftree import lazy_names

# For each file its public names. Type checkers read imports, below the table.
PUBLIC: dict[str, str] = {}


__getattr__, __dir__ = lazy_names.functions_of(__name__, PUBLIC)
