"""Objects with attributes, each of which is data or static.

    setattr -> attributes.py (data or static?) -> bookkeeping.py (the object's stamp)
    module(x) -> methods.py -> running.py (a frame) -> __call__ as it was written
    jax.tree.flatten -> pytrees.py -> data attributes are children, the rest the treedef

- ``attributes.py``: the status of an attribute: declared, or inferred when it is set;
  what is known of a class, looked up once.
- ``bookkeeping.py``: what is known of one object: owner, stamp, statuses, memos.
- ``running.py``: which object runs, and where it is; who makes objects; what messages
  say of objects.
- ``methods.py``: what stands for ``__call__`` and says so; observers of calls, and what
  JAX traces for them; results that are cast.
- ``pytrees.py``: `Pytree`, the base class, as a JAX pytree.
"""
