"""Filters: which leaves match, how filters are written, compared and printed."""

import dataclasses
import typing

import jax
import jax.numpy as jnp
import pytest

import graftree as nnx
from graftree import filterlib as filters


def matches(filter_, value, path=()):
    return filters.to_predicate(filter_)(path, value)


@pytest.mark.parametrize(
    ("filter_", "text"),
    [
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
    ],
)
def test_filters_become_predicates_that_print_what_they_are(filter_, text):
    assert repr(filters.to_predicate(filter_)) == text


def test_callable_is_its_own_predicate():
    def predicate(path, value):
        return True

    assert filters.to_predicate(predicate) is predicate


@pytest.mark.parametrize("invalid", [3, 1.5, {"a"}], ids=str)
def test_anything_else_is_refused(invalid):
    with pytest.raises(TypeError, match="Invalid collection filter") as caught:
        filters.to_predicate(invalid)
    assert repr(invalid) in str(caught.value)


@pytest.mark.parametrize(
    "filter_",
    [
        nnx.Param[jax.Array],
        nnx.Param | int,
        typing.Union[int, nnx.Param],  # noqa: UP007
        int | nnx.Param[jax.Array],
    ],
    ids=["generic", "union", "Union", "union of generic"],
)
def test_generics_and_unions_match_their_classes(filter_):
    assert matches(filter_, nnx.Param(1))
    assert not matches(filter_, nnx.BatchStat(1))
    assert not matches(filter_, "text")


def test_with_tag_needs_the_attribute_and_an_equal_value():
    assert matches("a", nnx.Variable(0, tag="a"))
    assert not matches("a", nnx.Variable(0, tag="b"))
    assert not matches("a", nnx.Variable(0))
    assert not matches("a", jnp.ones(2), path=("a",))


def test_of_type_includes_subclasses_and_takes_tuples():
    assert matches(nnx.Variable, nnx.Param(0))
    assert not matches(nnx.Param, nnx.Variable(0))
    assert filters.OfType((int, str))((), "a")


@pytest.mark.parametrize(
    ("key", "exact", "path", "expected"),
    [
        ("a", True, ("b", "a"), True),
        ("a", True, ("ab",), False),
        (1, True, ("1",), False),
        (1, False, ("10",), True),
        ("in", False, ("linear", 0), True),
        ("x", False, ("linear", 0), False),
    ],
)
def test_path_contains(key, exact, path, expected):
    assert filters.PathContains(key, exact=exact)(path, None) is expected


def test_path_in_compares_whole_paths():
    predicate = filters.PathIn(("a",), ("b", 1))
    assert predicate(("b", 1), None)
    assert not predicate(("b",), None)


def test_combinations_and_their_empty_forms():
    assert matches([int, str], "a") and not matches([], "a")
    assert filters.All()((), "a") and not filters.Any()((), "a")
    assert filters.All(str, filters.Not(int))((), "a")


def test_combinations_stop_at_the_first_answer():
    def fails(path, value):
        raise AssertionError("was called")

    assert filters.Any(..., fails)((), 1)
    assert not filters.All(None, fails)((), 1)


@pytest.mark.parametrize(
    "make",
    [
        lambda: filters.WithTag("a"),
        lambda: filters.OfType(int),
        lambda: filters.PathContains("a"),
        lambda: filters.PathIn(("a",), ("b",)),
        lambda: filters.Any(int, "a"),
        lambda: filters.All(int, "a"),
        lambda: filters.Not(int),
        lambda: filters.Everything(),
        lambda: filters.Nothing(),
    ],
)
def test_filters_equal_and_hash_by_content(make):
    assert make() == make() and hash(make()) == hash(make())
    assert make() != filters.Not(make())


def test_different_kinds_with_equal_content_differ():
    assert filters.Any(int) != filters.All(int)
    assert filters.PathIn(("a",), ("b",)) == filters.PathIn(("b",), ("a",))


def test_simple_filters_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        filters.WithTag("a").tag = "b"


def test_not_takes_its_filter_by_position_only():
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


def test_arguments_may_be_keywords():
    (found,) = filters.filters_to_predicates(filters=["a"])
    assert found == filters.to_predicate(filter="a")
