"""Takes objects apart, puts them together, compares them with what they were.

    object --nodes, flattening--> GraphDef + leaves --states--> State
    object <--flattening.Builder-- GraphDef + leaves <--matching-- State

- ``nodes.py``: nodes and their children; the objects that tree mode refuses.
- ``graphdefs.py``: `GraphDef`, drawn; `GraphState`.
- ``flattening.py``: objects taken apart; the builder that makes them.
- ``matching.py``: where the values of a state belong in an object or a GraphDef, and
  how far they fit there, for strict loads.
- ``validity_checks.py``: checks whether objects still are as they were.
- ``kept.py``: keeps the GraphDef of an object until its structure changes: a cache.
- ``differences.py``: the differences between two structures, by path, for messages.
- ``functional.py``: `split`, `merge`, `state`, `clone`, `call`, ...
- ``updates.py``: `update`, `pop`, `set_metadata`: objects changed in place.
- ``traversals.py``: `iter_graph`, `map`, `find_duplicates`: walks, by `core/walks.py`.
"""
