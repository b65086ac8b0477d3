"""Rules below `flax.core.spmd`."""

from flax.core import spmd

with spmd.logical_axis_rules((("batch", "data"),)):
    print(spmd.get_logical_axis_rules(), spmd.get_pspec(("batch", None)))
print(spmd.composite_rules((("a", "x"),), (("b", "y"),)))
print(spmd.from_sharding_rules(("a", None), (("a", "x"),)))
