"""An object taken apart, put together again, and compared with what it was.

    object --nodes, flattening--> GraphDef + leaves --states--> State
    object <--flattening.Builder-- GraphDef + leaves <--matching-- State

- ``nodes.py``: what is a node, and its children; what tree mode refuses.
- ``graphdefs.py``: `GraphDef`, drawn; `GraphState`.
- ``flattening.py``: objects taken apart; the builder that makes them.
- ``matching.py``: which part of a state belongs where in an object or a GraphDef, and
  how far it fits there, for strict loads.
- ``watches.py``: detects structural changes; caches the GraphDef until there is one.
- ``differences.py``: what differs between two structures, by path, for messages.
- ``functional.py``: `split`, `merge`, `state`, `clone`, `call`, ...
- ``updates.py``: `update`, `pop`, `set_metadata`: objects changed in place.
- ``traversals.py``: `iter_graph`, `map`, `find_duplicates`: walks, by `core/walks.py`.
"""
