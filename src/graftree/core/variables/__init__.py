"""Variables: mutable boxes for values, and what they are made of.

    Variable = raw value (array, ref or pytree) + metadata + owner

- ``variables.py``: `Variable`, a JAX pytree; what may write it; many read and written
  at once.
- ``kinds.py``: `Param`, `Cache`, ..., and their names.
- ``metadata.py``: the data of a Variable besides its value: hooks, flags, defaults.
- ``values.py``: the contents of the box: read, written, checked, copied; with refs.
- ``operators.py``: a Variable in arithmetic stands for its value; ``.value``.
- ``sharding.py``: where a value is placed; ``partitioning.py``: the same for trees.
"""
