"""Diagnostics never break or change the program that they watch."""

import io
import logging
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import sparse

import graftree as nnx
from graftree import errors
from tests import hostile_values
from tests.hostile_values import KINDS, PYTREES

X = jnp.ones((3, 2))


class Net(nnx.Module):
    def __init__(self, held=0, tag=0, data=0, value=1.0):
        self.kernel = nnx.Param(jnp.ones((2, 2)), tag=tag)
        self.held = nnx.static(held)
        self.data = nnx.data([data, {"a": data}])
        self.other = nnx.BatchStat(value)

    def __call__(self, x):
        return x @ self.kernel[...]


def in_value(kind, number):
    return Net(value={"a": [kind(jnp.full(2, float(number)))]})


# Each makes a model with a value of a kind; another number, another content.
PLACES = {
    "static": (KINDS, lambda kind, number: Net(held=kind(number))),
    "in a static list": (KINDS, lambda kind, number: Net(held=[1, (kind(number),)])),
    "metadata": (KINDS, lambda kind, number: Net(tag=kind(number))),
    "data": (PYTREES, lambda kind, number: Net(data=kind(jnp.ones(number)))),
    "value": (PYTREES, in_value),
}
CASES = [
    pytest.param(kind, make, id=f"{place}-{kind.__name__}")
    for place, (kinds, make) in PLACES.items()
    for kind in kinds
]
everywhere = pytest.mark.parametrize(("kind", "make"), CASES)


def call(model, x):
    return model(x)


@everywhere
def test_compiled_calls_are_explained_and_go_on(kind, make, mode, caplog):
    step, model = nnx.jit(call, **mode), make(kind, 1)
    for other, x in [(model, X)] * 3 + [(make(kind, 1), X), (make(kind, 2), X[:1])]:
        np.testing.assert_array_equal(step(other, x), jnp.full(x.shape, 2.0))
    assert "was traced" in str(nnx.debugging.explain_recompile(step))
    assert "only watches" not in caplog.text


@everywhere
def test_objects_print_in_each_form(kind, make, tmp_path):
    model = make(kind, 1)
    graphdef, state = nnx.split(model)
    texts = [repr(model), str(model), nnx.debugging.full_repr(model), repr(graphdef)]
    nnx.debugging.display_to_html(tmp_path / "model.html", model)
    texts += [pathlib.Path(tmp_path / "model.html").read_text(), repr(state)]
    texts += [nnx.tabulate(model, X)]
    assert all(texts)


@everywhere
def test_programs_are_searched_and_intercepted(kind, make):
    model, seen = make(kind, 1), []
    assert not nnx.debugging.find_nans(call)(model, X)
    with nnx.debugging.intercept(model, ..., lambda path, *_: seen.append(path)):
        nnx.jit(call)(model, X)
    assert seen == [()]


@everywhere
def test_errors_keep_their_own_messages(kind, make):
    model = make(kind, 1)
    for function in (call, nnx.jit(call)):
        with pytest.raises(TypeError, match="dot_general") as caught:
            function(model, jnp.ones((3, 5)))
        assert any("kernel" in note for note in caught.value.__notes__)
    with pytest.raises(nnx.errors.TraceContextError):
        jax.jit(lambda: model.kernel.set_value(1.0))()


@everywhere
def test_transforms_mean_what_they_mean(kind, make):
    model = make(kind, 1)
    for _ in range(3):
        copy = nnx.merge(*nnx.split(model))
        assert type(copy.held) is type(model.held)
        grads = nnx.grad(lambda model, x: model(x).sum())(model, X)
        np.testing.assert_array_equal(grads["kernel"][...], jnp.full((2, 2), 3.0))
    nnx.cond(True, call, call, model, X)
    nnx.fori_loop(0, 2, lambda _, model: model, model)
    nnx.remat(call)(model, X)


@pytest.mark.parametrize("kind", PYTREES)
def test_pytrees_are_passed_and_returned(kind):
    step = nnx.jit(lambda tree, x: (tree, x))
    for size in (2, 2, 3):
        tree, _ = step(kind(jnp.ones(size)), X)
        assert type(tree) is kind and tree.content.shape == (size,)
    assert "(2,)" in str(nnx.debugging.explain_recompile(step))


def test_a_variable_may_hold_a_sparse_matrix(mode):
    matrix = nnx.Param(sparse.BCOO.fromdense(jnp.eye(2)))
    step = nnx.jit(lambda matrix, x: matrix.get_value() @ x, **mode)
    for _ in range(3):
        np.testing.assert_array_equal(step(matrix, X.T), X.T)
    assert nnx.debugging.explain_recompile(step).traces == 1


def test_an_observer_that_fails_is_told_of_once(caplog):
    def watch(number):
        raise ZeroDivisionError(number)

    with caplog.at_level(logging.WARNING, "graftree"):
        assert [errors.fenced(watch, number) for number in range(3)] == [None] * 3
    (record,) = caplog.records
    assert "watch" in record.getMessage() and "ZeroDivisionError: 0" in caplog.text


def test_a_record_of_traces_that_fails_leaves_the_call_alone(monkeypatch, caplog):
    step = nnx.jit(call)
    monkeypatch.setattr(step.traces, "add", hostile_values.fail)
    monkeypatch.setattr(step.traces, "called", hostile_values.fail)
    for _ in range(3):
        np.testing.assert_array_equal(step(Net(), X), jnp.full((3, 2), 2.0))


# ------------------------------------------------- values that can't be inspected


@pytest.mark.parametrize("place", ["static", "metadata"])
def test_what_is_hidden_counts_as_changed_at_each_call(place, mode, caplog):
    hidden = hostile_values.Hidden("a")
    model = Net(held=hidden) if place == "static" else Net(tag=hidden)

    @nnx.jit(**mode)
    def length(model):
        text = model.held if place == "static" else model.kernel.get_metadata("tag")
        return len(text.getvalue()) + 0 * model.other[...]

    for count in (1, 2, 3, 4):
        assert length(model) == count
        hidden.seek(0, io.SEEK_END)
        hidden.write("b")
    assert "can't be inspected: every Hidden counts as changed" in caplog.text
    found = nnx.debugging.explain_recompile(length)
    assert found.traces == 4 and found.rows[0].now == "can't be inspected"


def test_what_is_hidden_is_the_same_within_a_trace(mode):
    model = Net(held=hostile_values.Hidden("a"))
    for _ in range(3):
        nnx.fori_loop(0, 2, lambda _, model: model, model, **mode)
        nnx.cond(True, call, call, model, X, **mode)
        assert nnx.graphdef(model) == nnx.graphdef(model)
        jax.tree.map(jnp.add, nnx.state(model), nnx.state(model))
