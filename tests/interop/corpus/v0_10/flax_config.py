"""Flags of Flax."""

import flax

print(flax.config.flax_max_repr_depth)
flax.config.update("flax_max_repr_depth", 1)
print(flax.config.flax_max_repr_depth)
flax.config.update("flax_max_repr_depth", None)
print(flax.__version__ >= "0.10")
try:
    flax.config.update("no_such_flag", 1)
except LookupError:
    print("LookupError")
