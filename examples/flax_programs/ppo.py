"""Proximal policy optimization on CartPole, the environment included, all in JAX.

One step plays 32 poles for 128 moments and learns from them. The loss is the share of
moments at which a pole falls: 0.05 at random.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

POLES, MOMENTS, EPOCHS, BATCHES = 32, 128, 4, 4
DISCOUNT, SMOOTHING, CLIP = 0.99, 0.95, 0.2
STEPS = 40
GOAL = 0.012


class Agent(nnx.Module):
    """A policy over two actions, and a value of states."""

    def __init__(self, *, rngs: nnx.Rngs):
        orthogonal = nnx.initializers.orthogonal
        self.inner = nnx.Linear(4, 64, kernel_init=orthogonal(2**0.5), rngs=rngs)
        self.policy = nnx.Linear(64, 2, kernel_init=orthogonal(0.01), rngs=rngs)
        self.value_inner = nnx.Linear(4, 64, kernel_init=orthogonal(2**0.5), rngs=rngs)
        self.value = nnx.Linear(64, 1, kernel_init=orthogonal(1.0), rngs=rngs)

    def __call__(self, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = self.policy(nnx.tanh(self.inner(state)))
        return nnx.log_softmax(logits), self.value(nnx.tanh(self.value_inner(state)))[
            ..., 0
        ]


class Moment(NamedTuple):
    state: jax.Array
    action: jax.Array
    log_probability: jax.Array
    value: jax.Array
    fell: jax.Array


class Environment(nnx.Module):
    """Poles on carts, ``[poles, (place, speed, angle, turning)]``."""

    def __init__(self, poles: int, *, rngs: nnx.Rngs):
        self.rngs = rngs
        self.state = nnx.Variable(self.fresh(poles))
        self.age = nnx.Variable(jnp.zeros(poles, int))

    def fresh(self, poles: int) -> jax.Array:
        return jax.random.uniform(
            self.rngs.world(), (poles, 4), minval=-0.05, maxval=0.05
        )

    def move(self, action: jax.Array) -> jax.Array:
        """Pushes each cart left (0) or right (1); says which poles fell."""
        _, speed, angle, turning = self.state[...].T
        sine, cosine = jnp.sin(angle), jnp.cos(angle)
        push = (20.0 * action - 10.0 + 0.05 * turning**2 * sine) / 1.1
        bend = (9.8 * sine - cosine * push) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
        thrust = push - 0.05 * bend * cosine / 1.1
        changes = jnp.stack([speed, thrust, turning, bend], axis=1)
        state = self.state[...] + 0.02 * changes
        fell = (jnp.abs(state[:, 0]) > 2.4) | (jnp.abs(state[:, 2]) > 0.2095)
        self.age[...] = jnp.where(fell, 0, self.age[...] + 1)
        over = fell | (self.age[...] == 0)
        self.state[...] = jnp.where(over[:, None], self.fresh(len(state)), state)
        return fell


def play(agent: Agent, environment: Environment, rngs: nnx.Rngs) -> Moment:
    """Plays for some moments, ``[moments, poles, ...]``."""

    @nnx.scan(length=MOMENTS, in_axes=nnx.Carry, out_axes=(nnx.Carry, 0))
    def moments(played):
        agent, environment, rngs = played
        state = environment.state[...]
        log_probabilities, value = agent(state)
        action = jax.random.categorical(rngs.action(), log_probabilities)
        chosen = jnp.take_along_axis(log_probabilities, action[:, None], axis=1)[:, 0]
        fell = environment.move(action)
        return played, Moment(state, action, chosen, value, fell)

    return moments((agent, environment, rngs))[1]


def advantages(moments: Moment, last_value: jax.Array) -> jax.Array:
    """Generalized advantage estimates, ``[moments, poles]``; reward 1 per moment."""

    def back(carry, moment):
        advantage, next_value = carry
        goes_on = 1.0 - moment.fell
        error = 1.0 + DISCOUNT * next_value * goes_on - moment.value
        advantage = error + DISCOUNT * SMOOTHING * goes_on * advantage
        return (advantage, moment.value), advantage

    start = jnp.zeros_like(last_value), last_value
    return jax.lax.scan(back, start, moments, reverse=True)[1]


def loss_of(agent: Agent, moments: Moment, advantage: jax.Array) -> jax.Array:
    log_probabilities, value = agent(moments.state)
    chosen = jnp.take_along_axis(log_probabilities, moments.action[:, None], axis=1)
    ratio = jnp.exp(chosen[:, 0] - moments.log_probability)
    scaled = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    clipped = jnp.clip(ratio, 1 - CLIP, 1 + CLIP)
    policy_loss = -jnp.minimum(ratio * scaled, clipped * scaled).mean()
    value_loss = 0.5 * jnp.mean((value - moments.value - advantage) ** 2)
    entropy = -jnp.sum(jnp.exp(log_probabilities) * log_probabilities, axis=-1).mean()
    return policy_loss + 0.5 * value_loss - 0.01 * entropy


@nnx.jit
def step(agent, optimizer, environment, rngs):
    moments = play(agent, environment, rngs)
    advantage = advantages(moments, agent(environment.state[...])[1])
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (moments, advantage))

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def learn(learning, places):
        agent, optimizer = learning
        batch = jax.tree.map(lambda x: x[places], flat)
        optimizer.update(agent, nnx.grad(loss_of)(agent, *batch))
        return learning

    keys = jax.random.split(rngs.shuffle(), EPOCHS)
    orders = jax.vmap(lambda key: jax.random.permutation(key, POLES * MOMENTS))(keys)
    learn((agent, optimizer), orders.reshape(EPOCHS * BATCHES, -1))
    return moments.fell.mean()


def build():
    rngs = nnx.Rngs(0, action=1, shuffle=2)
    agent = Agent(rngs=rngs)
    transformation = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(2.5e-3))
    optimizer = nnx.Optimizer(agent, transformation, wrt=nnx.Param)
    return agent, optimizer, Environment(POLES, rngs=nnx.Rngs(world=3)), rngs


def train(agent, optimizer, environment, rngs):
    for _ in range(STEPS):
        yield step(agent, optimizer, environment, rngs)


if __name__ == "__main__":
    for number, fell in enumerate(train(*build())):
        if number % 5 == 0:
            print(f"step {number}: {1 / max(float(fell), 1e-4):.0f} moments per fall")
