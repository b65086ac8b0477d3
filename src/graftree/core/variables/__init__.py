"""The box, and all it is made of.

    Variable = raw value (array, ref or pytree) + metadata + owner

- ``variables.py``: `Variable`, a JAX pytree; who may write it; many read and written
  at once.
- ``kinds.py``: `Param`, `Cache`, ..., and their names.
- ``metadata.py``: what a Variable carries besides its value; hooks, defaults.
- ``values.py``: what may be in the box: read, written, checked; refs included.
- ``operators.py``: a Variable in arithmetic stands for its value;
  ``older_accessors.py``: ``.value`` and ``.raw_value``.
- ``copying.py``: how Variables are copied and pickled.
- ``defaults.py``: options for Variables made in a context.
- ``sharding.py``: where a value is placed; ``partitioning.py``: the same for trees.
"""
