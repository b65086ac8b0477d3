"""Other spellings, of programs for Flax NNX and of older versions of this package.

- ``name_tables.py``: the tables of sub-module paths and older names; ``flax_names.py``
  installs them, and looks names up.
- ``compat.py``: the functions and transforms with graph mode switched on.
- ``older_functions.py``: small functions that programs import, and `deprecated`.
- ``norm_functions.py``: those from which people build norms of their own.
- ``graph_contexts.py``: the older, explicit way into a trace and back, with
  ``node_states.py``: objects as pytrees, `split_inputs` and `merge_inputs`.
- ``flax_side/``: modules that programs import beside ``flax.nnx``, without Flax.
- ``bridge/``: Modules of ``flax.linen`` as ours, and ours as theirs.
"""
