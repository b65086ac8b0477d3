"""Threads that draw from one object get different keys, and no draw is lost."""

import functools
import sys

import jax
import pytest

import graftree as nnx
from tests.threads import run_in_threads

THREADS, DRAWS = 4, 50


@pytest.fixture(autouse=True)
def eager_switches():
    """Threads take turns after almost each instruction."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


# Each draws one key of the stream `default`; what it gives tells which.
WAYS = {
    "stream": lambda rngs: rngs.default(),
    "rngs": lambda rngs: rngs(),
    "other name": lambda rngs: rngs.params(),
    "fork": lambda rngs: rngs.fork().default.key[...],
    "fork of a stream": lambda rngs: rngs["x"].fork().key[...],
    "split": lambda rngs: rngs.split(2).default.key[...][1],
    "broadcast": lambda rngs: rngs.default.broadcast(2).key[...][1],
    "distribution": lambda rngs: rngs.bits((2,)),
    "initializer": lambda rngs: rngs.params.lecun_normal()((2, 3)),
    "layer": lambda rngs: nnx.Linear(1, 2, use_bias=False, rngs=rngs).kernel[...],
}


def drawn_in_threads(rngs, ways):
    found = []

    def draw(way):
        found.extend([WAYS[way](rngs) for _ in range(DRAWS)])

    run_in_threads(*[functools.partial(draw, way) for way in ways])
    return found


def as_text(drawn):
    is_key = jax.numpy.issubdtype(drawn.dtype, jax.dtypes.prng_key)
    return str(jax.random.key_data(drawn) if is_key else drawn)


@pytest.mark.parametrize("way", WAYS)
def test_draws_of_one_kind_differ_and_all_count(way):
    rngs = nnx.Rngs(0)
    drawn = drawn_in_threads(rngs, [way] * THREADS)
    assert len({*map(as_text, drawn)}) == THREADS * DRAWS
    assert int(rngs.default.count[...]) == THREADS * DRAWS


@pytest.mark.parametrize("ref", [False, True])
def test_draws_are_those_of_one_thread_in_some_order(ref):
    with nnx.var_defaults(ref=ref):
        rngs, alone = nnx.Rngs(0), nnx.Rngs(0)
    ways = ["stream", "rngs", "fork", "other name"]
    drawn = drawn_in_threads(rngs, ways)
    expected = [alone() for _ in range(len(ways) * DRAWS)]
    assert {*map(as_text, drawn)} == {*map(as_text, expected)}


def test_streams_changed_in_place_are_changed_between_two_draws():
    rngs, drawn = nnx.Rngs(0), []

    def reseed():
        for seed in range(DRAWS):
            nnx.reseed(rngs, default=seed + 1)

    def draw():
        drawn.extend(rngs() for _ in range(DRAWS))

    run_in_threads(reseed, draw)
    assert len({*map(as_text, drawn)}) == DRAWS
