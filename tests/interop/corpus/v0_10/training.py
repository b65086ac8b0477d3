"""Training: the usual loop with metrics, optimizers by filters, partial steps."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx


class Net(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.linear = nnx.Linear(2, 2, rngs=rngs)
        self.drop = nnx.Dropout(rate=0.0, rngs=rngs)

    def __call__(self, x):
        return self.drop(self.linear(x))


net = Net(rngs=nnx.Rngs(0))
optimizer = nnx.ModelAndOptimizer(net, optax.adamw(0.1))
metrics = nnx.MultiMetric(
    accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss")
)
x, labels = jnp.array([[1.0, 0.0], [0.0, 1.0]]), jnp.array([0, 1])


def loss_fn(net, x, labels):
    logits = net(x)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean(), logits


@nnx.jit
def train_step(net, optimizer, metrics, x, labels):
    grad_fn = nnx.value_and_grad(loss_fn, has_aux=True)
    (loss, logits), grads = grad_fn(net, x, labels)
    metrics.update(loss=loss, logits=logits, labels=labels)
    optimizer.update(grads)


for _ in range(30):
    train_step(net, optimizer, metrics, x, labels)
print(f"{metrics.compute()['accuracy']:.2f}", metrics.compute()["loss"] < 0.7)

# `Optimizer(model, tx, wrt=...)`, and `update(model, grads)`, in `cached_partial`.
model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)


@nnx.jit
def step(model, optimizer, x, y):
    value, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - y) ** 2))(model)
    optimizer.update(model, grads)
    return value


cached = nnx.cached_partial(step, model, optimizer)
values = [cached(x, x[::-1]) for _ in range(10)]
print(values[0] > values[-1], f"{values[-1]:.4f}", optimizer.step.value)  # deprecated

# Part of a model is frozen: the optimizer sees what the filter chooses.
net = nnx.Dict(body=nnx.Linear(2, 2, rngs=nnx.Rngs(0)), head=model)
head = nnx.All(nnx.Param, nnx.PathContains("head"))
optimizer = nnx.Optimizer(net, optax.sgd(0.1, momentum=0.9), wrt=head)


@nnx.jit
def head_step(net, optimizer, x):
    def loss(net):
        return (net.head(net.body(x)) ** 2).mean()

    value, grads = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, head))(net)
    optimizer.update(net, grads)
    return value, grads


first, grads = head_step(net, optimizer, x)
last, _ = head_step(net, optimizer, x)
print(sorted(grads), bool(last < first))
print(len(jax.tree.leaves(nnx.state(optimizer, nnx.OptState))))
