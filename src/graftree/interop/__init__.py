"""Other spellings: what programs written for Flax NNX call by other names.

- ``flax_names.py``: the one table of older sub-module paths, and what installs it.
- ``compat.py``: the functions and transforms with graph mode switched on.
- ``ids.py``, ``deprecations.py``: small modules that client code imports.
"""
