"""What programs import beside nnx, and the flags of Flax."""

import flax
import jax
import jax.numpy as jnp
import optax
from flax import nnx, struct, traverse_util
from flax.core import freeze
from flax.training import train_state


@struct.dataclass
class Config:
    size: int = struct.field(pytree_node=False)
    scale: float = 1.0


model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
graphdef, params = nnx.split(model, nnx.Param)
pure = nnx.to_pure_dict(params)
print(sorted(traverse_util.flatten_dict({"m": pure}, sep="/")))
state = train_state.TrainState.create(
    apply_fn=graphdef.apply, params=params, tx=optax.sgd(0.1)
)
grads = jax.grad(lambda p: jnp.sum(state.apply_fn(p)(jnp.ones((1, 2)))[0]))(params)
state = state.apply_gradients(grads=grads)
print(state.step, Config(3).replace(scale=2.0))
print(state.params["bias"].value)  # deprecated
print(freeze({"a": {"b": 1}})["a"])

print(flax.config.flax_max_repr_depth)
flax.config.update("flax_max_repr_depth", 1)
print(flax.config.flax_max_repr_depth)
flax.config.update("flax_max_repr_depth", None)
print(flax.__version__ >= "0.10")
try:
    flax.config.update("no_such_flag", 1)
except LookupError:
    print("LookupError")
