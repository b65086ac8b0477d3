"""The name of `register_variable_name` before 0.10.

Not in Flax today.
"""

from flax import nnx


class Kind(nnx.Variable):
    pass


nnx.register_variable_name_type_pair("kinds", Kind)
print(nnx.variable_type_from_name("kinds") is Kind)
