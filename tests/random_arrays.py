"""Random arrays, of NumPy's numbers: JAX would compile a program for each shape."""

import jax.numpy as jnp
import numpy as np


def random(*shape, seed=0, mean=0.0, scale=1.0, dtype=jnp.float32):
    """Normal numbers."""
    return jnp.asarray(np.random.default_rng(seed).normal(mean, scale, shape), dtype)


def initializer(key, shape, dtype):
    """Fills a Param with them; where they come from an initializer is no matter."""
    return random(*np.ravel(shape), scale=0.5, dtype=dtype)


def random_mask(*shape, seed=0):
    """Booleans, most of them true."""
    return jnp.asarray(np.random.default_rng(seed).random(shape) < 0.7)
