"""Test set-up shared by the tests and by the doctests in ``src``.

JAX runs on the CPU, as eight devices, so that sharding is tested everywhere. It
refuses implicit rank promotion: a missing axis is an error, not a broadcast.

The tests compile thousands of tiny programs, which is most of their time. So these are
compiled with little optimization, as in JAX's own tests, and kept in a folder that all
processes of a run share. Both together make the tests twice as fast.
"""

import atexit
import os
import shutil
import tempfile

# All are read once, when JAX makes its backend; programs that tests start inherit
# them.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join(
    [os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8"]
).strip()

os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _programs = tempfile.mkdtemp(prefix="graftree-tests-")
    atexit.register(shutil.rmtree, _programs, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _programs
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import jax
import jax.numpy as jnp
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(autouse=True, scope="session")
def names_in_doctests(doctest_namespace):
    """Gives every doctest ``nnx``, ``jax`` and ``jnp``."""
    import graftree as nnx

    doctest_namespace.update(nnx=nnx, jax=jax, jnp=jnp)
