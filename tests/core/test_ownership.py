"""Ownership: tokens of traces, and errors that say what to do."""

import copy
import pickle

import jax
import pytest

import graftree as nnx
from graftree.core import ownership


def test_token_is_the_same_within_a_trace_and_another_in_an_inner_one():
    outer = ownership.current()
    seen = []

    @jax.jit
    def f():
        inner = ownership.current()
        seen.append((inner is outer, inner is ownership.current()))

    f()
    assert seen == [(False, True)] and ownership.current() is outer


def test_errors_name_type_place_and_way_out():
    error = ownership.variable_error(nnx.BatchStat(1), "args[0].mean")
    assert "Cannot mutate BatchStat from a different trace level" in str(error)
    assert "args[0].mean" in str(error) and "argument" in str(error)
    error = ownership.object_error(nnx.Dict(), "a")
    assert "Cannot mutate 'Dict' from different trace level" in str(error)
    assert "'a'" in str(error)


def test_snapshots_compare_by_trace():
    state = nnx.tracers.TraceState()
    assert state == nnx.tracers.TraceState() and state.is_valid()
    with pytest.raises(TypeError):
        hash(state)
    seen = []
    jax.vmap(lambda x: seen.extend([state.is_valid(), state == type(state)()]))(
        jax.numpy.ones(2)
    )
    assert seen == [False, False]


def test_snapshots_are_leafless_and_taken_anew():
    state = nnx.tracers.TraceState()
    assert jax.tree.leaves(state) == []
    seen = []

    @jax.jit
    def f(state):
        seen.append(state.is_valid())
        seen.append(pickle.loads(pickle.dumps(state)).is_valid())

    f(state)
    assert seen == [True, True] and copy.deepcopy(state).is_valid()


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ownership.read_only_error, ("read-only", "mutable=True")),
        (ownership.lost_update_error, ("would be lost", "ref=True")),
    ],
)
def test_error_names_type_path_and_way_out(error, words):
    message = str(error(nnx.Param(1), "a/b"))
    assert all(word in message for word in ("Param", "at a/b", *words))
