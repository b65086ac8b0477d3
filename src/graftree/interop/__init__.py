"""Other spellings, of programs for Flax NNX and of older versions of this package.

- ``flax_names.py``: the one table of older sub-module paths, and what installs it.
- ``compat.py``: the functions and transforms with graph mode switched on.
- ``older_functions.py``, ``helpers.py``: functions that it lacks elsewhere.
- ``ids.py``, ``deprecations.py``: small modules that client code imports.
- ``graph_contexts/``: the older, explicit way into a trace and back.
"""
