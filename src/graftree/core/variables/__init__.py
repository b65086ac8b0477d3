"""The box, and all it is made of.

    Variable = raw value (array, ref or pytree) + metadata + owner

- ``variables.py``: `Variable` and its kinds (`Param`, `Cache`, ...), a JAX pytree.
- ``labels.py``: metadata and ownership as attributes of it; ``metadata.py``: the
  immutable mapping they live in, hooks, defaults.
- ``values.py``: reading and writing what is in the box, refs included; the check
  before it; ``raw_values.py``: the same for many boxes at once.
- ``operators.py``: a Variable in arithmetic stands for its value;
  ``older_accessors.py``: ``.value`` and ``.raw_value``.
- ``defaults.py``: options for Variables made in a context;
  ``type_names.py``: kinds of Variables by name.
- ``sharding.py``: where a value is placed; ``partitioning.py``: the same for trees.
"""
