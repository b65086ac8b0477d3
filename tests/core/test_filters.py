"""Filters: which leaves match, how filters are written, compared and printed."""

import dataclasses
import typing

import jax
import pytest

import graftree as nnx
from graftree import filterlib as filters
from tests import tables


def matches(filter_, value, path=()):
    return filters.to_predicate(filter_)(path, value)


@tables.cases(
    "filter_, text",
    ("x", "WithTag('x')"),
    (int, "OfType(<class 'int'>)"),
    (True, "Everything()"),
    (..., "Everything()"),
    (False, "Nothing()"),
    (None, "Nothing()"),
    ([int, "x"], "Any(OfType(<class 'int'>), WithTag('x'))"),
    ((), "Any()"),
    (filters.Not(...), "Not(Everything())"),
    (filters.All("x", None), "All(WithTag('x'), Nothing())"),
    (filters.PathContains("a"), "PathContains('a', exact=True)"),
    (filters.PathIn(("a",), ("b",)), "PathIn(('a',),('b',))"),
)
def test_filters_become_predicates_that_print_what_they_are(filter_, text):
    assert repr(filters.to_predicate(filter_)) == text


def test_callable_is_its_own_predicate():
    assert filters.to_predicate(matches) is matches


@pytest.mark.parametrize("invalid", [3, 1.5, {"a"}], ids=str)
def test_anything_else_is_refused(invalid):
    with pytest.raises(TypeError, match="Invalid collection filter") as caught:
        filters.to_predicate(invalid)
    assert repr(invalid) in str(caught.value)


@tables.cases(
    "filter_, matching, others",
    (nnx.Param[jax.Array], [nnx.Param(1)], [nnx.BatchStat(1), "text"]),
    (nnx.Param | int, [nnx.Param(1), 1], [nnx.BatchStat(1), "text"]),
    (typing.Union[int, nnx.Param], [nnx.Param(1), 1], ["text"]),  # noqa: UP007
    (int | nnx.Param[jax.Array], [nnx.Param(1), 1], [nnx.BatchStat(1)]),
    ("a", [nnx.Variable(0, tag="a")], [nnx.Variable(0, tag="b"), nnx.Variable(0)]),
    (nnx.Variable, [nnx.Param(0)], [0]),
    (nnx.Param, [nnx.Param(0)], [nnx.Variable(0)]),
    (filters.OfType((int, str)), [1, "a"], [1.0]),
    ([int, str], ["a"], [1.0]),
    ([], [], ["a"]),
    (filters.All(), ["a"], []),
    (filters.All(str, filters.Not(int)), ["a"], [1]),
    (filters.Any(), [], ["a"]),
    ids=str,
)
def test_filters_match_values(filter_, matching, others):
    for expected, values in ((True, matching), (False, others)):
        assert [matches(filter_, value) for value in values] == [expected] * len(values)


@tables.cases(
    "filter_, path, expected",
    (filters.PathContains("a"), ("b", "a"), True),
    (filters.PathContains("a"), ("ab",), False),
    (filters.PathContains(1), ("1",), False),
    (filters.PathContains(1, exact=False), ("10",), True),
    (filters.PathContains("in", exact=False), ("linear", 0), True),
    (filters.PathContains("x", exact=False), ("linear", 0), False),
    (filters.PathIn(("a",), ("b", 1)), ("b", 1), True),
    (filters.PathIn(("a",), ("b", 1)), ("b",), False),
    ("a", ("a",), False),
)
def test_filters_match_paths(filter_, path, expected):
    assert matches(filter_, None, path) is expected


def test_combinations_stop_at_the_first_answer():
    def fails(path, value):
        raise AssertionError("was called")

    assert filters.Any(..., fails)((), 1) and not filters.All(None, fails)((), 1)


@tables.cases(
    "make",
    lambda: filters.WithTag("a"),
    lambda: filters.OfType(int),
    lambda: filters.PathContains("a"),
    lambda: filters.PathIn(("a",), ("b",)),
    lambda: filters.Any(int, "a"),
    lambda: filters.All(int, "a"),
    lambda: filters.Not(int),
    filters.Everything,
    filters.Nothing,
)
def test_filters_equal_and_hash_by_content(make):
    assert make() == make() and hash(make()) == hash(make())
    assert make() != filters.Not(make())


def test_different_kinds_with_equal_content_differ():
    assert filters.Any(int) != filters.All(int)
    assert filters.PathIn(("a",), ("b",)) == filters.PathIn(("b",), ("a",))


def test_filters_are_frozen_and_take_what_they_combine_by_position():
    with pytest.raises(dataclasses.FrozenInstanceError):
        filters.WithTag("a").tag = "b"
    with pytest.raises(TypeError):
        filters.Not(collection_filter=int)


@pytest.mark.parametrize("rest", [..., True])
def test_rest_must_come_last(rest):
    with pytest.raises(ValueError, match="can only be used as the last filters") as e:
        filters.filters_to_predicates(["a", rest, int])
    assert f"{rest!r} at index 1" in str(e.value)


def test_rest_may_follow_rest_and_predicates_may_stand_anywhere():
    assert filters.filters_to_predicates([..., True]) == (filters.Everything(),) * 2
    assert len(filters.filters_to_predicates([filters.Everything(), int])) == 2
    (found,) = filters.filters_to_predicates(filters=["a"])
    assert found == filters.to_predicate(filter="a")
