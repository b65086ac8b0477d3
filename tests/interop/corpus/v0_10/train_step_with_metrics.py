"""The usual training loop with a MultiMetric inside the jitted step."""

import jax.numpy as jnp
import optax
from flax import nnx


class Net(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.linear = nnx.Linear(2, 3, rngs=rngs)
        self.drop = nnx.Dropout(rate=0.0, rngs=rngs)

    def __call__(self, x):
        return self.drop(self.linear(x))


net = Net(rngs=nnx.Rngs(0))
optimizer = nnx.ModelAndOptimizer(net, optax.adamw(0.1))
metrics = nnx.MultiMetric(
    accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss")
)
x, labels = jnp.array([[1.0, 0.0], [0.0, 1.0]]), jnp.array([0, 2])


def loss_fn(net, x, labels):
    logits = net(x)
    return optax.softmax_cross_entropy_with_integer_labels(
        logits, labels
    ).mean(), logits


@nnx.jit
def train_step(net, optimizer, metrics, x, labels):
    grad_fn = nnx.value_and_grad(loss_fn, has_aux=True)
    (loss, logits), grads = grad_fn(net, x, labels)
    metrics.update(loss=loss, logits=logits, labels=labels)
    optimizer.update(grads)


for _ in range(30):
    train_step(net, optimizer, metrics, x, labels)
print(f"{metrics.compute()['accuracy']:.2f}", metrics.compute()["loss"] < 0.7)
