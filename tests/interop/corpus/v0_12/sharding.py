"""Annotations by metadata, their older keys, abstract models, logical names."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.core import spmd

mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
placed = {"out_sharding": (None, "data"), "optimizer_sharding": ("data", None)}


def create():
    return nnx.Linear(2, 2, kernel_metadata=placed, rngs=nnx.Rngs(0))


graphdef, state = nnx.get_abstract_model(create, mesh)
print([state[name].get_value().sharding.spec for name in ("kernel", "bias")])
with jax.set_mesh(mesh):
    abstract = nnx.eval_shape(create)
    older = nnx.abstract_with_sharding(abstract)  # deprecated
    print(older.kernel.get_value().sharding.spec)
    print(nnx.as_abstract(abstract).kernel.get_value().sharding.spec)

    # Optimizer state is placed differently from its parameters.
    optimizer = nnx.Optimizer(create(), optax.adam(0.1), wrt=nnx.Param)
mu = optimizer.opt_state[0].mu["kernel"]
print(type(mu).__name__, mu.out_sharding)

with jax.set_mesh(mesh), nnx.logical_axis_rules([("batch", "data")]):
    v = nnx.Param(jnp.ones((2, 2)), out_sharding=("batch", None))
    print(nnx.get_partition_spec(v).get_value())
print(v.out_sharding, v.get_value().sharding.spec)
rules = (("b", "data"),)
w = nnx.Param(jnp.ones(2), out_sharding=("b",), sharding_rules=rules, mesh=mesh)
print(w.get_value().sharding.spec)
with spmd.logical_axis_rules((("batch", "data"),)):
    print(spmd.get_logical_axis_rules(), spmd.get_pspec(("batch", None)))
print(spmd.composite_rules((("a", "x"),), (("b", "y"),)))
print(spmd.from_sharding_rules(("a", None), (("a", "x"),)))

with nnx.use_eager_sharding(False):
    v = nnx.Param(jnp.ones((2, 2)), out_sharding=("a", None))
    old = nnx.Param(jnp.ones((2, 2)), sharding=("a", None))  # deprecated
print(v.out_sharding == old.out_sharding, nnx.using_eager_sharding())
print(nnx.get_partition_spec(v).get_value(), v.get_metadata("out_sharding"))

nnx.use_eager_sharding(False)
v.set_metadata(sharding=("d", None))  # deprecated
print(v.out_sharding)
v.set_metadata("sharding_names", ("b", None))  # deprecated
print(v.out_sharding, v.has_metadata("sharding_names"))
nnx.set_metadata(nnx.Dict(v=v), sharding=("c", None))  # deprecated
print(v.out_sharding)
