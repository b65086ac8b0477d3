"""gpjax: the kernel of a Gaussian process is fitted to a noisy sine."""

import gpjax
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from gpjax.parameters import Parameter

jax.config.update("jax_enable_x64", True)
STEPS = 100
GOAL = 20.0  # nats; 70 at the start


@nnx.jit
def step(posterior, optimizer, data):
    def loss_fn(posterior):
        return -gpjax.objectives.conjugate_mll(posterior, data)

    grad = nnx.value_and_grad(loss_fn, argnums=nnx.DiffState(0, Parameter))
    loss, grads = grad(posterior)
    optimizer.update(posterior, grads)
    return loss


def build():
    kernel, mean = gpjax.kernels.RBF(), gpjax.mean_functions.Zero()
    prior = gpjax.gps.Prior(kernel=kernel, mean_function=mean)
    posterior = prior * gpjax.likelihoods.Gaussian(num_datapoints=60)
    return posterior, nnx.Optimizer(posterior, optax.adam(0.03), wrt=Parameter)


def train(posterior, optimizer):
    x = jnp.linspace(-3, 3, 60)[:, None]
    noise = 0.2 * jax.random.normal(jax.random.key(0), x.shape)
    data = gpjax.Dataset(x, jnp.sin(2 * x) + noise)
    for _ in range(STEPS):
        yield step(posterior, optimizer, data)
