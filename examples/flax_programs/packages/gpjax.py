"""gpjax: the kernel of a Gaussian process is fitted to a noisy sine."""

import gpjax
import jax
import jax.numpy as jnp
import optax

jax.config.update("jax_enable_x64", True)
STEPS = 100
GOAL = 40.0


def build():
    x = jnp.linspace(-3, 3, 60)[:, None]
    noise = 0.2 * jax.random.normal(jax.random.key(0), x.shape)
    data = gpjax.Dataset(x, jnp.sin(2 * x) + noise)
    prior = gpjax.gps.Prior(gpjax.mean_functions.Zero(), gpjax.kernels.RBF())
    likelihood = gpjax.likelihoods.Gaussian(num_datapoints=data.n)
    return prior * likelihood, data


def train(posterior, data):
    _, losses = gpjax.fit(
        model=posterior,
        objective=lambda model, data: -gpjax.objectives.conjugate_mll(model, data),
        train_data=data,
        optim=optax.adam(0.05),
        num_iters=STEPS,
        verbose=False,
    )
    yield from losses
