"""The shared code of layers.

- ``arguments.py``: the arguments of layers: inputs to check, dtypes, sizes, axes and
  padding; state that comes back if a call fails; how constructors make Params and keep
  settings
- ``eager.py``: makes eager calls fast
- ``meshes.py``: what layers compute with, on a mesh with axes of the type Explicit
"""
