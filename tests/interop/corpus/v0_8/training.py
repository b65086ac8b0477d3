"""Optimizers as they were and what they say today, LoRA, metrics, SGD by hand."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
x = jnp.linspace(0, 1, 8)[:, None]


def loss(model):
    return jnp.mean((model(x) - 2 * x - 1) ** 2)


@nnx.jit
def step(model):
    value, grads = nnx.value_and_grad(loss)(model)
    params = nnx.state(model, nnx.Param)
    nnx.update(model, jax.tree.map(lambda p, g: p - 0.5 * g, params, grads))
    return value


for _ in range(60):
    value = step(model)
print(f"{model.kernel.value[0, 0]:.2f} {model.bias.value[0]:.2f}")  # deprecated

optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
for call in (
    lambda: nnx.Optimizer(model, optax.sgd(0.1)),
    lambda: optimizer.update(nnx.state(model, nnx.Param)),
):
    try:
        call()
    except TypeError as error:
        text = str(error)
        print("Missing required argument" in text, "ModelAndOptimizer" in text)
optimizer = nnx.ModelAndOptimizer(model, optax.sgd(0.1))
before = model.bias[0]
optimizer.update(nnx.grad(lambda m: m(x).sum())(model))
print(optimizer.model is model, f"{model.bias[0] - before:.2f}")

net = nnx.LoRA(1, lora_rank=2, out_features=1, base_module=model, rngs=nnx.Rngs(1))
print(net(x).shape, list(nnx.state(net, nnx.LoRAParam)))
optimizer = nnx.Optimizer(net, optax.sgd(0.1), wrt=nnx.LoRAParam)
grads = nnx.grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))(net)
before = net.base_module.kernel.value  # deprecated
optimizer.update(net, grads)
print((net.base_module.kernel.value == before).all())  # deprecated

metrics = nnx.metrics.MultiMetric(
    accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss")
)
logits = jnp.array([[1.0, 2.0], [3.0, 0.0]])
metrics.update(loss=jnp.array(0.5), logits=logits, labels=jnp.array([1, 1]))
print({name: float(value) for name, value in metrics.compute().items()})
metrics.reset()
print(bool(jnp.isnan(metrics.compute()["loss"])))
