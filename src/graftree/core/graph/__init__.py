"""An object taken apart, put together again, and compared with what it was.

    object --nodes, flattening--> GraphDef + leaves --states--> State
    object <--flattening.Builder-- GraphDef + leaves <--matching-- State

- ``nodes.py``: what is a node, and its children; ``tree_checks.py``: what tree mode
  refuses.
- ``graphdefs.py``: `GraphDef`, drawn; ``graph_states.py``: `GraphState`.
- ``flattening.py``: the walk that takes objects apart, and the builder that undoes it;
  ``matching.py``: the leaves of States to the places of a GraphDef.
- ``surveys.py``: is an object built as it was? ``memos.py``: then it is taken apart
  from memory.
- ``differences.py``: what differs between two structures, by path, for all messages.
- ``functional.py``: `split`, `merge`, `state`, ...; ``updating.py``: `update`, `pop`;
  ``cloning.py``, ``calling.py``: `clone`, `call`.
- ``traversals.py``: walks: `iter_graph`, `map`, `find_duplicates`.
"""
