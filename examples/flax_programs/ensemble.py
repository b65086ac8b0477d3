"""Eight regressors at once, by ``nnx.vmap``; where they differ they do not know."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

MEMBERS = 8
STEPS = 500
GOAL = 0.06  # mean squared error; the noise has 0.01, batch statistics add some


class Regressor(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.inner = nnx.Linear(1, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, momentum=0.9, rngs=rngs)
        self.outer = nnx.Linear(32, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.outer(nnx.tanh(self.norm(self.inner(x))))


@nnx.split_rngs(splits=MEMBERS)
@nnx.vmap
def make_members(rngs: nnx.Rngs) -> Regressor:
    return Regressor(rngs)


@nnx.jit
def step(members, optimizer, x, y):
    def loss_of(members):
        predictions = nnx.vmap(lambda member, x: member(x))(members, x)
        losses = jnp.mean((predictions - y) ** 2, axis=(1, 2))
        return losses.sum(), losses.mean()

    (_, loss), grads = nnx.value_and_grad(loss_of, has_aux=True)(members)
    optimizer.update(members, grads)
    return loss


@nnx.jit
def predict(members, x):
    members = nnx.view(members, use_running_average=True)
    return nnx.vmap(lambda member: member(x))(members)


def build():
    members = make_members(nnx.Rngs(0))
    return members, nnx.Optimizer(members, optax.adam(2e-2), wrt=nnx.Param)


def train(members, optimizer):
    for key in jax.random.split(jax.random.key(1), STEPS):
        x_key, noise_key = jax.random.split(key)
        x = jax.random.uniform(x_key, (MEMBERS, 64, 1), minval=-1, maxval=1)
        noise = 0.1 * jax.random.normal(noise_key, x.shape)
        yield step(members, optimizer, x, jnp.sin(3 * x) + noise)


if __name__ == "__main__":
    members, optimizer = build()
    for number, loss in enumerate(train(members, optimizer)):
        if number % 50 == 0:
            print(f"step {number}: mean squared error {loss:.3f}")
    spread = predict(members, jnp.array([[0.0], [0.5], [5.0]])).std(0).ravel()
    print("the members differ at 0, 0.5 and 5 by", spread.round(3))
