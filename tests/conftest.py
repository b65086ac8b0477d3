"""Fixtures and settings of the tests; the settings of JAX are in ``/conftest.py``."""

import os

import hypothesis
import jax
import pytest

import graftree as nnx
from graftree import _jax_names
from tests import modes

# No deadline: the first call of anything in JAX compiles. In CI the examples are the
# same in every run, so that a red build can be repeated.
hypothesis.settings.register_profile("dev", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_generate_tests(metafunc):
    """Runs a test that has a mode in all of them."""
    modes.parametrize(metafunc)


def pytest_itemcollected(item):
    """Marks what is compared with Flax NNX."""
    if "peer" in getattr(item, "fixturenames", ()):
        item.add_marker("peers")


@pytest.fixture(scope="session")
def peer():
    """Flax NNX."""
    return pytest.importorskip("flax.nnx")


@pytest.fixture
def in_mode(mode):
    """Makes one of the three modes the default."""
    updates = mode.get("graph_updates", False)
    with nnx.set_graph_mode(mode["graph"]), nnx.set_graph_updates(updates):
        yield


@pytest.fixture
def implicit_ranks():
    """Lets a bias be added as programs of others do it."""
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def float64():
    """Runs the test with 64-bit types switched on."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(autouse=True)
def names_of_jax(monkeypatch):
    """Fails a test in which a name of JAX was found to have moved or changed."""
    told, tell = [], _jax_names.tell
    monkeypatch.setattr(_jax_names, "tell", lambda *x: (told.append(x), tell(*x)))
    yield
    assert not told
