"""`get_abstract_model`, `as_abstract`, and the older name."""

import jax
from flax import nnx

mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


def create():
    return nnx.Linear(
        2, 4, kernel_metadata={"out_sharding": (None, "data")}, rngs=nnx.Rngs(0)
    )


graphdef, state = nnx.get_abstract_model(create, mesh)
print(
    state["kernel"].get_value().sharding.spec, state["bias"].get_value().sharding.spec
)
with jax.set_mesh(mesh):
    abstract = nnx.eval_shape(create)
    print(
        nnx.abstract_with_sharding(abstract)  # deprecated
        .kernel.get_value()
        .sharding.spec  # deprecated
    )
    print(nnx.as_abstract(abstract).kernel.get_value().sharding.spec)
