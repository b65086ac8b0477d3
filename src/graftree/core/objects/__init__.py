"""Objects with attributes, each of which is data or static.

    setattr -> attributes.py (data or static?) -> bookkeeping.py (the object's stamp)
    jax.tree.flatten -> pytrees.py -> data attributes are children, the rest the treedef

- ``attributes.py``: the status of an attribute: declared, or inferred when it is set.
- ``classes.py``: what is known of a class, looked up once.
- ``bookkeeping.py``: what is known of one object: owner, stamp, statuses, memos.
- ``pytrees.py``: `Pytree`, the base class, as a JAX pytree.
"""
