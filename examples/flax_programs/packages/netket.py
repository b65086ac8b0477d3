"""netket: a network is the wave function of a spin chain; its energy is minimized."""

import jax
import netket
import optax
from flax import nnx

STEPS = 40
GOAL = -9.0


class Wave(nnx.Module):
    def __init__(self, sites: int, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(sites, 16, rngs=rngs, param_dtype=float)
        self.out = nnx.Linear(16, 1, rngs=rngs, param_dtype=float)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(nnx.tanh(self.hidden(x)))[..., 0]


def build():
    graph = netket.graph.Chain(8)
    space = netket.hilbert.Spin(0.5, graph.n_nodes)
    energy = netket.operator.Ising(space, graph, h=1.0)
    state = netket.vqs.FullSumState(space, Wave(8, nnx.Rngs(0)))
    return state, energy


def train(state, energy):
    optimizer = optax.adam(0.02)
    opt_state = optimizer.init(state.parameters)
    for _ in range(STEPS):
        loss, grads = state.expect_and_grad(energy)
        updates, opt_state = optimizer.update(grads, opt_state, state.parameters)
        state.parameters = optax.apply_updates(state.parameters, updates)
        yield loss.mean.real
