"""LoRA around a layer, and training of its parameters only."""

import jax.numpy as jnp
import optax
from flax import nnx

net = nnx.LoRA(
    3,
    lora_rank=2,
    out_features=4,
    base_module=nnx.Linear(3, 4, rngs=nnx.Rngs(0)),
    rngs=nnx.Rngs(1),
)
print(net(jnp.ones((1, 3))).shape, list(nnx.state(net, nnx.LoRAParam)))
optimizer = nnx.Optimizer(net, optax.sgd(0.1), wrt=nnx.LoRAParam)
grads = nnx.grad(
    lambda n: (n(jnp.ones((1, 3))) ** 2).sum(), argnums=nnx.DiffState(0, nnx.LoRAParam)
)(net)
before = net.base_module.kernel.value  # deprecated
optimizer.update(net, grads)
print((net.base_module.kernel.value == before).all())  # deprecated
