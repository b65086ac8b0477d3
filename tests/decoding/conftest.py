"""A model of one layer, for all that the number of layers does not change."""

import pytest

import graftree as nnx
from tests.decoding.decoders import Decoder


@pytest.fixture(scope="package")
def model():
    """A model that tests only read."""
    return Decoder(None, rngs=nnx.Rngs(7))


@pytest.fixture
def watched():
    """A model, and the shapes of the tokens with which it was called."""
    traced = []

    class Watched(Decoder):
        def __call__(self, tokens, **more):
            traced.append(tokens.shape)
            return super().__call__(tokens, **more)

    return Watched(None, rngs=nnx.Rngs(0)), traced
