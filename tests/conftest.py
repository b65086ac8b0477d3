"""Fixtures and settings of the tests; the settings of JAX are in ``/conftest.py``."""

import os

import hypothesis
import jax
import pytest

# No deadline: the first call of anything in JAX compiles. In CI the examples are the
# same in every run, so that a red build can be repeated.
hypothesis.settings.register_profile("dev", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")


@pytest.fixture
def float64():
    """Runs the test with 64-bit types switched on."""
    with jax.enable_x64(True):
        yield
