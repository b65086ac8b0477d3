"""Derivatives in the form of arguments and outputs."""

import jax.numpy as jnp
import pytest

import graftree as nnx
from graftree.config import GRAPH, GRAPH_UPDATES
from graftree.transforms.crossing import packing
from graftree.transforms.derivatives import cotangents
from graftree.transforms.derivatives.cotangents import FormError


class Pair(nnx.Module):
    def __init__(self, a, b):
        self.a, self.b = nnx.Param(a), nnx.BatchStat(b)


def pack(*args, mode):
    return packing.pack((args, {}), mode, "example").signature


def test_leaves_and_arguments_are_inverse(mode):
    signature = pack(Pair(1, 2), {"x": jnp.zeros(2)}, nnx.Param(3), mode=mode)
    given = {0: 10, 1: 20, 2: 30, 3: 40}
    args = cotangents.arguments(signature, given, mode, range(3))
    assert type(args[0]) is (nnx.State if mode.structure else Pair)
    assert args[1] == {"x": 30} and type(args[2]) is nnx.Param
    found = cotangents.leaves(signature, (args, {}), mode, "it", range(4))
    assert found == [10, 20, 30, 40]
    assert cotangents.arguments(signature, given, mode, (1,)) == ({"x": 30},)
    assert cotangents.tree(signature, given, mode)[0][1] == {"x": 30}


def test_what_is_not_given_is_missing_or_none(mode):
    signature = pack(Pair(1, 2), 3.0, mode=mode)
    pair, x = cotangents.arguments(signature, {1: 20}, mode, range(2))
    assert x is None and pair.b.get_value() == 20
    assert "a" not in pair if mode.structure else pair.a is None


def test_shared_objects_stay_shared_or_are_in_the_first_state():
    pair = Pair(1, 2)
    signature = pack(pair, [pair], mode=GRAPH)
    first, (second,) = cotangents.arguments(signature, {0: 1, 1: 2}, GRAPH, (0, 1))
    assert first is second
    for given in (first, [second]), (first, [None]):
        assert cotangents.leaves(signature, (given, {}), GRAPH, "it", (0, 1)) == [1, 2]
    signature = pack(pair, [pair], mode=GRAPH_UPDATES)
    first, (second,) = cotangents.arguments(
        signature, {0: 1, 1: 2}, GRAPH_UPDATES, (0, 1)
    )
    assert set(first) == {"a", "b"} and len(second) == 0


def test_one_argument_is_part_of_a_signature():
    signature = pack(Pair(1, 2), 3.0, mode=GRAPH)
    assert [e is None for e in signature.of_argument(0).entries] == [False]
    assert [e is None for e in signature.of_argument(1).entries] == [True]


def test_none_stands_for_an_object(mode):
    signature = pack([Pair(1, 2)] if mode.sharing else [nnx.Param(1)], mode=mode)
    given = (([None],), {})
    assert set(cotangents.leaves(signature, given, mode, "it", (0,))) == {None}


def test_forms_must_fit(mode):
    signature = pack([Pair(1, 2)], mode=mode)

    def leaves(given, wanted=(0, 1)):
        return cotangents.leaves(signature, (given, {}), mode, "the example", wanted)

    with pytest.raises(FormError, match="Wrong structure of the example"):
        leaves(([1, 2],))
    with pytest.raises(FormError, match="the example"):
        leaves(([nnx.Dict(a=nnx.Param(1))],))
    if mode.structure:
        with pytest.raises(FormError, match="Expected State or Variable, got Pair"):
            leaves(([Pair(1, 2)],))
        with pytest.raises(FormError, match="(?s)unexpected: b"):
            leaves(([nnx.state(Pair(1, 2))],), wanted=(0,))
    assert issubclass(FormError, TypeError) and issubclass(FormError, ValueError)
