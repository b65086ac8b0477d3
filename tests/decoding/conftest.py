"""A Llama of one layer, for all that the number of layers does not change."""

import dataclasses
import itertools

import pytest

import graftree as nnx
from examples.models import llama
from tests import tiny_llamas

CONFIG = dataclasses.replace(tiny_llamas.CONFIG, num_hidden_layers=1)


@pytest.fixture(scope="package")
def model():
    """A model that tests only read."""
    return llama.Llama(CONFIG, rngs=nnx.Rngs(3))


@pytest.fixture
def watched():
    """A model, and the shapes of the tokens with which it was called."""
    traced = []

    class Watched(llama.Llama):
        def __call__(self, *args, **kwargs):
            traced.append(args[0].shape)
            return super().__call__(*args, **kwargs)

    return Watched(CONFIG, rngs=nnx.Rngs(0)), traced


def joined(parts):
    """The tokens of all parts of a stream, row by row."""
    rows = zip(*(part.lists() for part in parts), strict=True)
    return [[*itertools.chain(*row)] for row in rows]
