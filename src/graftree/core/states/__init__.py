"""Leaves by path, without the structure they came from.

    State {"a": {"b": x}}  <->  FlatState [(("a", "b"), x)]  <->  pure dict

- ``flat_states.py``: nested mappings of any kind, flattened and nested again;
  `FlatState`, pairs in order of their paths, filtered in groups.
- ``states.py``: `State`, and functions that split, merge, filter and map it.
- ``pairs.py``: a state beside its target: which value belongs where.
- ``pure_dicts.py``: States as dicts of plain arrays, and back.
"""
