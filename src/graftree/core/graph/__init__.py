"""An object taken apart, put together again, and compared with what it was.

    object --nodes, flattening--> GraphDef + leaves --states--> State
    object <--merging.Builder-- GraphDef + leaves <--merging.match-- State

- ``nodes.py``: what is a node, and its children; ``tree_checks.py``: what tree mode
  refuses.
- ``graphdefs.py``: `GraphDef`, drawn; ``graph_states.py``: `GraphState`.
- ``flattening.py``: the walk that takes objects apart; ``merging.py``: leaves of States
  to the places of a GraphDef, and the builder that makes the object.
- ``freshness.py``: detects structural changes; caches the GraphDef until there is one;
  ``appearances.py``: whether an object that was changed is what it was.
- ``differences.py``: what differs between two structures, by path, for messages.
- ``functional.py``: `split`, `merge`, `state`, `clone`, `call`, ...
- ``proxy_callers.py``: what `call` returns: a method by attributes and items.
- ``fits.py``: how the leaves of an object and those of a state fit each other.
- ``updates.py``: `update`, `set_metadata`: objects changed in place; ``removals.py``:
  `pop`.
- ``traversals.py``: walks: `iter_graph`, `map`, `find_duplicates`.
"""
