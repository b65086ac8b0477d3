"""Proximal policy optimization on CartPole, the environment included, all in JAX.

One update runs 32 environments for 128 time steps and learns from them. The loss is the
share of time steps at which an episode ends: 0.05 for a random policy.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

ENVIRONMENTS, TIME_STEPS, EPOCHS, BATCHES = 32, 128, 4, 4
DISCOUNT, SMOOTHING, CLIP = 0.99, 0.95, 0.2
STEPS = 40
GOAL = 0.012


class Agent(nnx.Module):
    """An actor and a critic: log-probabilities of the actions, and the value."""

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


class Transition(NamedTuple):
    state: jax.Array
    action: jax.Array
    log_probability: jax.Array
    value: jax.Array
    done: jax.Array


class Environment(nnx.Module):
    """CartPoles: ``[count, (position, velocity, angle, angular_velocity)]``."""

    def __init__(self, count: int, *, rngs: nnx.Rngs):
        self.rngs = rngs
        self.state = nnx.Variable(self.initial_state(count))
        self.age = nnx.Variable(jnp.zeros(count, int))

    def initial_state(self, count: int) -> jax.Array:
        return jax.random.uniform(
            self.rngs.world(), (count, 4), minval=-0.05, maxval=0.05
        )

    def step(self, action: jax.Array) -> jax.Array:
        """Pushes each cart left (0) or right (1); returns which episodes ended."""
        _, velocity, angle, angular_velocity = self.state[...].T
        sine, cosine = jnp.sin(angle), jnp.cos(angle)
        force = (20.0 * action - 10.0 + 0.05 * angular_velocity**2 * sine) / 1.1
        angular = (9.8 * sine - cosine * force) / (
            0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1)
        )
        acceleration = force - 0.05 * angular * cosine / 1.1
        changes = jnp.stack([velocity, acceleration, angular_velocity, angular], axis=1)
        state = self.state[...] + 0.02 * changes
        done = (jnp.abs(state[:, 0]) > 2.4) | (jnp.abs(state[:, 2]) > 0.2095)
        self.age[...] = jnp.where(done, 0, self.age[...] + 1)
        over = done | (self.age[...] == 0)
        self.state[...] = jnp.where(
            over[:, None], self.initial_state(len(state)), state
        )
        return done


def rollout(agent: Agent, environment: Environment, rngs: nnx.Rngs) -> Transition:
    """Acts for some time steps: transitions, ``[time, environments, ...]``."""

    @nnx.scan(length=TIME_STEPS, in_axes=nnx.Carry, out_axes=(nnx.Carry, 0))
    def act(carry):
        agent, environment, rngs = carry
        state = environment.state[...]
        log_probabilities, value = agent(state)
        action = jax.random.categorical(rngs.action(), log_probabilities)
        chosen = jnp.take_along_axis(log_probabilities, action[:, None], axis=1)[:, 0]
        done = environment.step(action)
        return carry, Transition(state, action, chosen, value, done)

    return act((agent, environment, rngs))[1]


def advantages(transitions: Transition, last_value: jax.Array) -> jax.Array:
    """Generalized advantage estimates, ``[time, environments]``; all rewards are 1."""

    def backward(carry, transition):
        advantage, next_value = carry
        not_done = 1.0 - transition.done
        error = 1.0 + DISCOUNT * next_value * not_done - transition.value
        advantage = error + DISCOUNT * SMOOTHING * not_done * advantage
        return (advantage, transition.value), advantage

    start = jnp.zeros_like(last_value), last_value
    return jax.lax.scan(backward, start, transitions, reverse=True)[1]


def loss_of(agent: Agent, transitions: Transition, advantage: jax.Array) -> jax.Array:
    log_probabilities, value = agent(transitions.state)
    chosen = jnp.take_along_axis(log_probabilities, transitions.action[:, None], axis=1)
    ratio = jnp.exp(chosen[:, 0] - transitions.log_probability)
    scaled = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    clipped = jnp.clip(ratio, 1 - CLIP, 1 + CLIP)
    policy_loss = -jnp.minimum(ratio * scaled, clipped * scaled).mean()
    value_loss = 0.5 * jnp.mean((value - transitions.value - advantage) ** 2)
    entropy = -jnp.sum(jnp.exp(log_probabilities) * log_probabilities, axis=-1).mean()
    return policy_loss + 0.5 * value_loss - 0.01 * entropy


@nnx.jit
def step(agent, optimizer, environment, rngs):
    transitions = rollout(agent, environment, rngs)
    advantage = advantages(transitions, agent(environment.state[...])[1])
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (transitions, advantage))

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def learn(carry, indices):
        agent, optimizer = carry
        batch = jax.tree.map(lambda x: x[indices], flat)
        optimizer.update(agent, nnx.grad(loss_of)(agent, *batch))
        return carry

    keys = jax.random.split(rngs.shuffle(), EPOCHS)
    orders = jax.vmap(
        lambda key: jax.random.permutation(key, ENVIRONMENTS * TIME_STEPS)
    )(keys)
    learn((agent, optimizer), orders.reshape(EPOCHS * BATCHES, -1))
    return transitions.done.mean()


def build():
    rngs = nnx.Rngs(0, action=1, shuffle=2)
    agent = Agent(rngs=rngs)
    transformation = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(2.5e-3))
    optimizer = nnx.Optimizer(agent, transformation, wrt=nnx.Param)
    return agent, optimizer, Environment(ENVIRONMENTS, rngs=nnx.Rngs(world=3)), rngs


def train(agent, optimizer, environment, rngs):
    for _ in range(STEPS):
        yield step(agent, optimizer, environment, rngs)


if __name__ == "__main__":
    for number, done in enumerate(train(*build())):
        if number % 5 == 0:
            print(f"step {number}: {1 / max(float(done), 1e-4):.0f} steps per episode")
