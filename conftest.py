"""Test set-up shared by the tests and by the doctests in ``src``.

JAX runs on the CPU, as eight devices, so that sharding is tested everywhere. It
refuses implicit rank promotion: a missing axis is an error, not a broadcast.
"""

import os

# Both are read once, when JAX makes its backend; programs that tests start inherit
# them.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join(
    [os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8"]
).strip()

import jax
import jax.numpy as jnp
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(autouse=True, scope="session")
def names_in_doctests(doctest_namespace):
    """Gives every doctest ``nnx``, ``jax`` and ``jnp``."""
    import graftree as nnx

    doctest_namespace.update(nnx=nnx, jax=jax, jnp=jnp)
