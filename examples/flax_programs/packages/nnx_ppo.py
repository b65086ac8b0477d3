"""nnx-ppo: an agent learns to walk to the origin of a plane."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from nnx_ppo.algorithms import ppo
from nnx_ppo.networks.factories import make_mlp_actor_critic

STEPS = 40
GOAL = 5.0  # of the critic's loss, which falls as it learns the returns


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
    plane = Plane()
    networks = make_mlp_actor_critic(2, 2, [32, 32], [32, 32], rngs=nnx.Rngs(0))
    state = ppo.new_training_state(plane, networks, 64, seed=1, learning_rate=3e-3)
    return plane, state


def train(plane, state):
    @nnx.jit
    def step(state):
        return ppo.ppo_step(
            plane,
            state,
            n_envs=64,
            rollout_length=16,
            gae_lambda=0.95,
            discounting_factor=0.97,
            clip_range=0.2,
            normalize_advantages=True,
            combine_advantages=False,
            n_epochs=2,
            n_minibatches=2,
        )

    for _ in range(STEPS):
        state, metrics = step(state)
        yield metrics["losses/critic/mean"]
