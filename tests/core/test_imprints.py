"""Imprints tell apart what Python takes for equal, and a value from what it was.

An imprint is what skeletons are hashed and compared by; that transforms tell static
values apart is in tests/contract/test_transforms/test_static_values.py.
"""

import collections
import copy
import dataclasses
import enum
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftree.core import imprints

Pair = collections.namedtuple("Pair", "one two")


class Size(enum.IntEnum):
    ONE = 1


@dataclasses.dataclass(frozen=True)
class Frozen:
    size: object
    cache: object = dataclasses.field(default=None, compare=False)


@dataclasses.dataclass(unsafe_hash=True)
class Open:
    size: object


class Hashed:
    def __init__(self, number):
        self.number = number

    def __eq__(self, other):
        return self.number == other.number

    def __hash__(self):
        return hash(self.number)


EQUAL = [
    [1, True, 1.0, 1 + 0j, np.int8(1), np.int32(1), np.float32(1), np.True_, Size.ONE],
    [0.0, -0.0, 0, False],
    [complex(0.0, 0.0), complex(0.0, -0.0), complex(-0.0, 0.0)],
    [(1, 2), (1.0, 2), Pair(1, 2), (True, 2)],
    [frozenset([1]), frozenset([1.0]), {1}],
    [frozenset([(1, 2.0)]), frozenset([(1.0, 2)])],
    [Frozen(1), Frozen(1.0), Frozen(True)],
    [((0.0,),), ((-0.0,),)],
]


@pytest.mark.parametrize("values", EQUAL, ids=str)
def test_equal_values_of_other_types_or_signs_are_told_apart(values):
    for a, b in itertools.combinations(values, 2):
        assert a == b and imprints.imprint(a) != imprints.imprint(b)
        assert imprints.told_apart((a,)) != imprints.told_apart((b,))


@pytest.mark.parametrize("value", [*itertools.chain(*EQUAL), Hashed(1), "a", None])
def test_copies_have_equal_imprints_with_equal_hashes(value):
    imprint, copied = imprints.imprint(value), imprints.imprint(copy.deepcopy(value))
    assert imprint == copied and hash(imprint) == hash(copied)


atoms = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
nested = st.recursive(
    atoms,
    lambda inner: (
        st.lists(inner).map(tuple)
        | st.lists(inner)
        | st.dictionaries(st.text(), inner)
        | st.builds(Frozen, inner)
    ),
)


@given(nested)
def test_imprints_of_nested_values_are_hashable_and_stay(value):
    imprint = imprints.imprint(value)
    assert hash(imprint) == hash(imprints.imprint(value))
    assert imprint == imprints.imprint(value)


CHANGES = {
    "list": ([1, 2], lambda x: x.append(3)),
    "nested list": ([1, [2]], lambda x: x[1].append(3)),
    "type in a list": ([1], lambda x: x.__setitem__(0, True)),
    "dict": ({"a": 1}, lambda x: x.update(a=1.0)),
    "set": ({1}, lambda x: x.add(2)),
    "tuple of a list": (([1],), lambda x: x[0].append(2)),
    "dataclass": (Open(1), lambda x: setattr(x, "size", 1.0)),
    "list in a dataclass": (Frozen([1]), lambda x: x.size.append(2)),
    "object with a hash": (Hashed(-1), lambda x: setattr(x, "number", -2)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_in_place_is_seen(name):
    value, change = CHANGES[name][0], CHANGES[name][1]
    assert imprints.may_change(value)
    before = imprints.imprint(value)
    change(value)
    assert imprints.imprint(value) != before


@pytest.mark.parametrize(
    "value",
    [
        *(1, "a", 1.5, None, np.float32(1), Size.ONE, (1, (2.0,)), frozenset([1])),
        *(print, object(), jnp.float32, np.dtype("int8"), jax.sharding.PartitionSpec()),
        *(Frozen(1), Frozen((1, "a")), imprints.HashableMapping({"a": 1})),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_can_not_change_is_known(value):
    assert not imprints.may_change(value)


def test_fields_that_do_not_count_for_equality_do_not_count():
    assert imprints.imprint(Frozen(1, [2])) == imprints.imprint(Frozen(1, [3]))


def test_a_list_that_contains_itself_has_an_imprint():
    value = [1]
    value.append(value)
    assert imprints.imprint(value) == imprints.imprint(value)


def test_an_imprint_keeps_no_array():
    value = [jnp.ones(2), np.ones(2)]
    assert imprints.imprint(value) == imprints.imprint([jnp.zeros(3), np.zeros(1)])


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (1, 1.0, True),
        ("x", "y", False),
        (np.ones(2), np.ones(2), True),
        (np.ones(2), np.zeros(2), False),
        (np.ones(2), np.ones(3), False),
        (jnp.ones(2), np.ones(2), True),
        (np.ones(2), "x", False),
        ([np.ones(2)], [np.ones(2)], False),
    ],
    ids=str,
)
def test_static_values_compare_to_a_bool(a, b, same):
    assert imprints.same_value(a, b) is same


def test_the_same_object_is_always_equal():
    value = [np.ones(2)]
    assert imprints.same_value(value, value)


def test_tracers_are_equal_only_to_themselves():
    seen = []

    def f(x, y):
        seen.extend([imprints.same_value(x, x), imprints.same_value(x, y)])

    jax.jit(f)(1.0, 1.0)
    assert seen == [True, False]
