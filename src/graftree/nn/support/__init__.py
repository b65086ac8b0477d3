"""The shared code of layers.

- ``arguments.py``: the arguments of layers: inputs to check, dtypes, sizes, axes and
  padding; state that comes back if a call fails; Params
- ``arithmetic.py``: sums and products of arrays of any dtypes
- ``eager.py``: compiles eager calls of layers
- ``groups.py``: rows that are sorted by group, and multiplied with its parameters
- ``jax_functions.py``: functions of JAX that tools replace for a while
- ``meshes.py``: what layers compute with, on a mesh with axes of the type Explicit
"""
