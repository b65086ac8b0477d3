"""jraphx: a graph network says which of two groups the nodes of a graph are in."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jraphx.nn.conv import GCNConv

NODES = 60
STEPS = 100
GOAL = 0.05  # nats; ln 2 = 0.69 if it knows nothing


class Network(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first = GCNConv(8, 16, rngs=rngs)
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.second = GCNConv(16, 2, rngs=rngs)

    def __call__(self, x: jax.Array, edges: jax.Array) -> jax.Array:
        return self.second(nnx.relu(self.norm(self.first(x, edges))), edges)


@nnx.jit
def step(model, optimizer, x, edges, groups):
    def loss_fn(model):
        logits = model(x, edges)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, groups)
        return losses.mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def build():
    model = Network(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


def train(model, optimizer):
    groups = jnp.arange(NODES) % 2
    features, ends = jax.random.split(jax.random.key(1))
    x = jax.random.normal(features, (NODES, 8)) + 0.5 * groups[:, None]
    starts, steps = jax.random.randint(ends, (2, 4 * NODES), 0, NODES // 2)
    # Each edge joins two nodes of one group.
    edges = jnp.stack([starts, (starts + 2 * steps) % NODES])
    for _ in range(STEPS):
        yield step(model, optimizer, x, edges, groups)
