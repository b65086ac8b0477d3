"""Settings for programs in the style of Linen."""

import jax
import pytest


@pytest.fixture(autouse=True)
def rank_promotion():
    """Lets a bias be added as programs for Linen do it."""
    with jax.numpy_rank_promotion("allow"):
        yield
