"""Layers against those of Flax NNX, over a grid of options: see `peer_grid`."""

import inspect

import jax
import pytest

import graftree as nnx
from tests import modes
from tests.nn import peer_grid
from tests.nn.peer_grid import Subject, compare, difference, numbers, unequal

pytestmark = pytest.mark.peers


@pytest.fixture(scope="session", autouse=True)
def newest_peer():
    """Compares with the release that we follow; the command compares with any."""
    pytest.importorskip("flax", minversion="0.12.12")


TABLES = pytest.mark.parametrize("table", peer_grid.TABLES)
DIFFERING = [
    name
    for name, table in peer_grid.TABLES.items()
    if any(case.why_different for case in table())
]
LAYERS = pytest.mark.parametrize(
    "table",
    [name for name in peer_grid.TABLES if inspect.isclass(getattr(nnx, name, 0))],
)


def every(step, table, peer):
    """Each so many of the cases that must agree, the first among them."""
    cases = [c for c in peer_grid.cases(table, peer) if not c.why_different]
    if not cases:
        pytest.skip(f"this version of the peer has no {table}")
    return cases[::step]


def check(chosen, peer, limit, mode=None):
    """Fails with all problems in one message, so that one run shows them all."""
    found = [
        f"{case}\n    {problem}"
        for case in chosen
        for problem in compare(case, peer, limit, mode)
    ]
    assert not found, "\n".join([f"{len(found)} differences:", *found])


@pytest.mark.parametrize(
    "start", [0, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 2, 3))]
)
@TABLES
def test_layers_equal_those_of_the_peer(peer, table, start):
    # A part of the grid; `python -m tests.nn.peer_grid` compares all of it.
    chosen = every(24, table, peer)[start::4]
    check(chosen, peer, peer_grid.LIMITS.get(table, 0))


@pytest.mark.parametrize(
    "start", [0, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 2))]
)
@pytest.mark.parametrize("table", DIFFERING)
def test_where_the_peer_is_wrong_we_differ(peer, table, start):
    cases = [c for c in peer_grid.cases(table, peer) if c.why_different]
    agreeing = [str(c) for c in cases[start::3] if not compare(c, peer)]
    assert not agreeing, agreeing


@LAYERS
@pytest.mark.parametrize(
    "mode",
    [pytest.param(modes.GRAPH, marks=pytest.mark.long), modes.TREE],
    ids=["graph", "tree"],
)
def test_layers_equal_those_of_the_peer_inside_jit(peer, table, mode):
    check(every(1, table, peer)[:1], peer, limit=8, mode=mode)


@LAYERS
def test_states_are_interchangeable(peer, table):
    limit = peer_grid.LIMITS.get(table, 0)
    for case in every(60, table, peer):
        for giver, taker in ((nnx, peer), (peer, nnx)):
            source, target = Subject(case, giver), Subject(case, taker, seed=8)
            target.load(source)
            for a, b in zip(
                *(jax.tree.leaves(s(0)) for s in (source, target)), strict=True
            ):
                assert difference(numbers(a), numbers(b)) <= limit, case
            assert not unequal(source.state(), target.state(), limit), case


@LAYERS
def test_gradients_equal_those_of_the_peer(peer, table):
    case = every(1, table, peer)[0]
    ours, theirs = Subject(case, nnx), Subject(case, peer)
    assert not unequal(ours.gradients(0), theirs.gradients(0), limit=8)
    assert not unequal(ours.state(), theirs.state(), limit=8)


def test_every_layer_is_in_the_grid(peer):
    def is_layer(name, value):
        return inspect.isclass(value) and value.__module__.startswith("graftree.nn.")

    layers = {name for name in nnx.__all__ if is_layer(name, getattr(nnx, name))}
    theirs = {name for name in layers if hasattr(peer, name)}
    without_numbers = {"LoRAParam", "RNNCellBase", "Sequential"}
    assert theirs - without_numbers <= set(peer_grid.TABLES)
