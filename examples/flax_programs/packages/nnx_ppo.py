"""nnx-ppo: an agent learns to walk to the origin of a plane."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from nnx_ppo.algorithms import ppo
from nnx_ppo.networks.factories import make_mlp_actor_critic

STEPS = 40
GOAL = 0.0


class State(NamedTuple):
    obs: jax.Array
    reward: jax.Array
    done: jax.Array
    info: dict
    metrics: dict


class Plane:
    """The reward falls with the distance; too far away, the episode ends."""

    def reset(self, key: jax.Array) -> State:
        return self.at(jax.random.uniform(key, (2,), minval=-1, maxval=1))

    def step(self, state: State, action: jax.Array) -> State:
        return self.at(state.obs + 0.1 * jnp.clip(action, -1, 1))

    def at(self, position: jax.Array) -> State:
        distance = jnp.sum(position**2)
        done = (distance > 4).astype(float)
        return State(position, jnp.exp(-distance), done, {}, {})


def build():
    networks = make_mlp_actor_critic(2, 2, [32, 32], [32, 32], rngs=nnx.Rngs(0))
    return (ppo.new_training_state(Plane(), networks, 64, seed=1, learning_rate=3e-3),)


def train(state):
    step = nnx.jit(ppo.ppo_step, static_argnums=(0, 2, 3, 7, 8, 9, 10, 12, 13))
    for _ in range(STEPS):
        state, metrics = step(
            Plane(), state, 64, 16, 0.95, 0.97, 0.2, True, False, 2, 2, 1.0
        )
        print(*metrics)
        yield next(iter(metrics.values()))
