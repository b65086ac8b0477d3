"""The older, explicit way into a trace and back; new programs don't need it.

- ``contexts.py``: `split_context`, `merge_context`, `update_context`.
- ``node_states.py``: `to_tree` and `from_tree`, objects as pytrees of `NodeStates`;
  `split_inputs` and `merge_inputs`, both around any JAX transform.
"""
