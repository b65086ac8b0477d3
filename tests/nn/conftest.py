"""What the tests of layers share."""

import pytest


@pytest.fixture(scope="session")
def peer():
    """The library whose numbers and attributes the layers reproduce."""
    return pytest.importorskip("flax.nnx")
