"""Objects with attributes, each of which is data or static.

    setattr -> attributes.py (data or static?) -> bookkeeping.py (the object's version)
    module(x) -> methods.py -> running.py (a frame) -> __call__ as it was written
    jax.tree.flatten -> pytrees.py -> data attributes are children, the rest the treedef

- ``attributes.py``: the status of an attribute: declared, or inferred when it is set;
  the facts about a class, looked up once.
- ``bookkeeping.py``: the data on one object: owner, version, statuses, results.
- ``running.py``: the running object and its path; makers of objects; the descriptions
  of objects in messages.
- ``methods.py``: the stand-in for ``__call__``, which reports calls; observers of
  calls, and the traces made for them; results that are cast.
- ``callables.py``: methods, partials and transformed functions in their parts, where
  they are arguments, functions of transforms, or an object's own.
- ``pytrees.py``: `Pytree`, the base class, as a JAX pytree.
"""
