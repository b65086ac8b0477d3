"""Layers against those of Flax NNX, over tables of cases; the peer is right in most.

`make test` compares one case in `STEP` of a table; `make test-all` all, and gradients.
"""

import inspect

import pytest

import graftree as nnx
from tests import catalog, modes, tables
from tests.nn import peer_layer_cases, peer_sequence_cases
from tests.nn.peer_grid import Subject, compare, of_outputs, unequal

pytestmark = pytest.mark.peers

TABLES = {**peer_layer_cases.TABLES, **peer_sequence_cases.TABLES}
DIFFERENT = [x for table in TABLES.values() for x in table() if x.why_different]
# Ulps. Elsewhere every bit is equal. These were compiled as a whole once, which rounds
# otherwise than one operation after the other.
LIMITS = {"MultiHeadAttention": 4, "dot_product_attention": 4, "RoPE": 4}
ROWS = [row for row in catalog.LAYERS if row.name in TABLES]
STEP, LONG = 16, pytest.mark.long


@pytest.fixture(autouse=True)
def newest_peer():
    """Compares with the release that we follow."""
    pytest.importorskip("flax", minversion="0.12.12")


def agreeing(table):
    return [case for case in TABLES[table]() if not case.why_different]


@tables.cases("start", 0, *(pytest.param(n, marks=LONG) for n in range(1, STEP)))
@pytest.mark.parametrize("table", TABLES)
def test_layers_equal_those_of_the_peer(peer, table, start):
    limit = LIMITS.get(table, 0)
    found = [
        f"{case}\n    {problem}"
        for case in agreeing(table)[start::STEP]
        for problem in compare(case, peer, limit)
    ]
    assert not found, "\n".join([f"{len(found)} differences:", *found])


@pytest.mark.parametrize(
    "case",
    [pytest.param(x, marks=LONG if i % 4 else ()) for i, x in enumerate(DIFFERENT)],
    ids=lambda case: f"{case.name}: {case.why_different}",
)
def test_where_the_peer_is_wrong_we_differ(peer, case):
    assert compare(case, peer)


@LONG
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
@pytest.mark.parametrize("mode", [modes.GRAPH, modes.TREE], ids=["graph", "tree"])
def test_outputs_and_gradients_inside_jit_equal_those_of_the_peer(peer, row, mode):
    ours, theirs = (Subject(agreeing(row.name)[0], library) for library in (nnx, peer))
    (outputs, gradients), (expected, of_peer) = ours.in_jit(mode), theirs.in_jit(mode)
    assert not [*of_outputs(outputs, expected, limit=8)]
    assert not unequal(gradients, of_peer, limit=8)
    assert not unequal(ours.state(), theirs.state(), limit=8)


@catalog.of_families(ROWS)
def test_states_are_interchangeable(peer, row):
    case, limit = agreeing(row.name)[0], LIMITS.get(row.name, 0)
    for giver, taker in ((nnx, peer), (peer, nnx)):
        source, target = Subject(case, giver), Subject(case, taker, seed=8)
        target.load(source)
        assert not [*of_outputs(target(0), source(0), limit)]
        assert not unequal(source.state(), target.state(), limit)


def test_every_layer_is_in_the_grid(peer):
    def is_layer(name, value):
        return inspect.isclass(value) and value.__module__.startswith("graftree.nn.")

    layers = {name for name in nnx.__all__ if is_layer(name, getattr(nnx, name))}
    theirs = {name for name in layers if hasattr(peer, name)}
    assert theirs - {"LoRAParam", "RNNCellBase", "Sequential"} <= set(TABLES)
