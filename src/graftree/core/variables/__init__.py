"""The box, and all it is made of.

    Variable = raw value (array, ref or pytree) + metadata + owner

- ``variables.py``: `Variable`, a JAX pytree; who may write it; many read and written
  at once; `Param`, `Cache`, ..., and their names.
- ``metadata.py``: what a Variable carries besides its value: hooks, flags, defaults.
- ``values.py``: what may be in the box: read, written, checked, copied; refs included.
- ``operators.py``: a Variable in arithmetic stands for its value; ``.value``.
- ``sharding.py``: where a value is placed; ``partitioning.py``: the same for trees.
"""
