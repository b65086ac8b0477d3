"""Static values that Python takes for equal, or changed in place, are told apart.

Here by skeletons; tests/contract/test_transforms/test_static_values.py has transforms.
"""

import collections
import copy
import dataclasses
import enum
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import graftree as nnx
from tests import zoo

Pair = collections.namedtuple("Pair", "one two")


@dataclasses.dataclass(frozen=True)
class Frozen:
    size: object
    cache: object = dataclasses.field(default=None, compare=False)


class Size(enum.IntEnum):
    ONE = 1


@dataclasses.dataclass(unsafe_hash=True)
class Open:
    size: object


def skeleton(value):
    return nnx.graphdef(zoo.Box(k=nnx.static(value)))


EQUAL = [
    [1, True, 1.0, 1 + 0j, np.int8(1), np.int32(1), np.float32(1), np.True_, Size.ONE],
    [0.0, -0.0, 0, False],
    [complex(0.0, 0.0), complex(0.0, -0.0), complex(-0.0, 0.0)],
    [(1, 2), (1.0, 2), Pair(1, 2), (True, 2)],
    [frozenset([1]), frozenset([1.0]), {1}],
    [frozenset([(1, 2.0)]), frozenset([(1.0, 2)])],
    [Frozen(1), Frozen(1.0), Frozen(True)],
    [((0.0,),), ((-0.0,),)],
    [float("nan")],
    [(float("nan"),)],
]


@pytest.mark.parametrize("values", EQUAL, ids=str)
def test_equal_values_of_other_types_or_signs_are_told_apart(values):
    for a, b in itertools.combinations(values, 2):
        assert a == b and skeleton(a) != skeleton(b)
    for value in values:
        assert skeleton(value) == skeleton(copy.deepcopy(value))


# Two dataclasses that hold NaN are not equal since Python 3.13.
numbers = st.integers() | st.floats(allow_nan=False)
atoms = st.none() | st.booleans() | numbers | st.text()
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
def test_copies_of_nested_values_have_equal_skeletons(value):
    assert skeleton(value) == skeleton(copy.deepcopy(value))
    assert skeleton(Frozen(1, [value])) == skeleton(Frozen(1, value))


CHANGES = {
    "list": ([1, 2], lambda x: x.append(3)),
    "nested list": ([1, [2]], lambda x: x[1].append(3)),
    "type in a list": ([1], lambda x: x.__setitem__(0, True)),
    "dict": ({"a": 1}, lambda x: x.update(a=1.0)),
    "set": ({1}, lambda x: x.add(2)),
    "tuple of a list": (([1],), lambda x: x[0].append(2)),
    "dataclass": (Open(1), lambda x: setattr(x, "size", 1.0)),
    "list in a dataclass": (Frozen([1]), lambda x: x.size.append(2)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_in_place_is_seen(name, graph):
    given, change = CHANGES[name]
    value, seen, expected = copy.deepcopy(given), [], []
    m = zoo.Box(k=nnx.static(value))
    f = nnx.jit(lambda m: seen.append(repr(m.k)), graph=graph)
    for step in (lambda x: None, change):
        step(value)
        expected.append(repr(value))
        for _ in range(3):
            f(m)
    assert seen == expected
