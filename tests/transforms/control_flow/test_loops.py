"""`while_loop` and `fori_loop`: the same objects in every step."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import comparisons, zoo
from tests.modes import GRAPH_UPDATES

LOOPS = pytest.mark.parametrize("loop", ["while_loop", "fori_loop"])


def pair():
    return zoo.Box(a=nnx.Variable(jnp.array(0.0)), b=nnx.Variable(jnp.array(1.0)))


def run(loop, body, value, count=3, **mode):
    """The body ``count`` times, in either loop."""
    if loop == "fori_loop":
        return nnx.fori_loop(0, count, lambda i, value: body(value), value, **mode)

    def step(state):
        number, value = state
        return number + 1, body(value)

    return nnx.while_loop(lambda state: state[0] < count, step, (0, value), **mode)[1]


@LOOPS
def test_updates_reach_the_callers_objects(loop, mode):
    model = pair()

    def body(model):
        model.a[...] += model.b
        return model

    out = run(loop, body, model, **mode)
    assert model.a[...] == 3.0
    assert (out is model) == (mode is GRAPH_UPDATES)
    assert out.a is model.a and out.b is model.b


@LOOPS
def test_no_step_changes_nothing(loop, mode):
    model = pair()

    def body(model):
        model.a[...] += 1
        return model

    assert run(loop, body, model, count=0, **mode).a is model.a
    assert model.a[...] == 0


def test_writes_of_the_condition_are_dropped(mode):
    model = pair()

    def condition(model):
        model.b[...] += 100
        return model.a < 3

    def body(model):
        model.a[...] += 1
        return model

    nnx.while_loop(condition, body, model, **mode)
    assert model.a[...] == 3 and model.b[...] == 1


def test_the_number_of_the_step_is_passed(mode):
    total = nnx.Variable(jnp.array(0))

    def add(i, total):
        total[...] += i
        return total

    nnx.fori_loop(2, 5, add, total, **mode)
    assert total[...] == 9
    nnx.fori_loop(jnp.array(2), np.int32(5), add, total, **mode)
    assert total[...] == 18


def test_bounds_may_be_traced(mode):
    @jax.jit
    def power(x, n):
        return nnx.fori_loop(0, n, lambda i, y: x * y, 1.0, **mode)

    assert power(2.0, 5) == 32


def test_known_bounds_can_be_differentiated_in_reverse(mode):
    def power(x):
        return nnx.fori_loop(0, 3, lambda i, y: x * y, 1.0, **mode)

    assert jax.grad(power)(2.0) == 12


@LOOPS
def test_repeated_nodes_and_shared_parts_stay_shared(loop, graph_mode):
    model = pair()

    def body(value):
        first, second = value
        assert first is second
        first.a[...] += 1
        return first, second

    out = run(loop, body, (model, model), **graph_mode)
    assert model.a[...] == 3 and out[0] is out[1]


def swap_parts(model):
    model.a, model.b = model.b, model.a
    return model


def variable():
    return nnx.Variable(jnp.array(0.0))


OTHERS = {
    "a new object": (pair, lambda model: pair()),
    "a new Variable": (variable, lambda v: nnx.Variable(v[...] + 1)),
    "swapped Variables": (lambda: (variable(), variable()), lambda both: both[::-1]),
    "swapped attributes": (pair, swap_parts),
}


@LOOPS
@pytest.mark.parametrize("name", OTHERS)
def test_other_objects_than_those_of_the_caller_are_refused(name, loop, mode):
    make, body = OTHERS[name]
    value = make()
    before = comparisons.snapshot(value)
    phrase = f"{loop} Variable identity must be preserved across iterations"
    if mode is GRAPH_UPDATES:
        phrase = "same reference and pytree structure"
    with pytest.raises(ValueError, match=phrase):
        run(loop, body, value, **mode)
    assert comparisons.snapshot(value) == before


@LOOPS
@pytest.mark.parametrize("error", [TypeError, ValueError])
def test_a_changed_attribute_is_an_error_of_both_types(loop, error, mode):
    def mark(model):
        model.mark = 2
        return model

    model = pair()
    model.mark = 1
    with pytest.raises(error, match=r"mark.*1.*before.*2.*after"):
        run(loop, mark, model, **mode)
    assert model.mark == 1


@LOOPS
def test_another_structure_is_refused(loop, mode):
    def extend(model):
        model.extra = 1
        return model

    for body in (lambda model: (model, 1), extend):
        model = pair()
        with pytest.raises((ValueError, TypeError), match=loop):
            run(loop, body, model, **mode)
        assert not hasattr(model, "extra")


def test_functions_are_not_kept_alive():
    def body(i, x):
        return x + 1

    nnx.fori_loop(0, 2, body, 0)
    alive = weakref.ref(body)
    del body
    gc.collect()
    assert alive() is None


def test_arrays_of_carried_objects_are_carried(mode):
    def double(i, holder):
        holder.array = holder.array * 2
        return holder

    holder = zoo.Box(array=jnp.array(1.0))
    out = nnx.fori_loop(0, 3, double, holder, **mode)
    assert out.array == 8
    assert holder.array == (8 if mode is GRAPH_UPDATES else 1)


@LOOPS
def test_nothing_is_around_the_loop_that_jax_compiles(loop, mode):
    def f(x):
        return run(loop, lambda x: x * 2, x, **mode)

    text = jax.jit(f).lower(1.0).as_text()
    plain = jax.jit(lambda x: jax.lax.fori_loop(0, 3, lambda i, x: x * 2, x))
    expected = plain.lower(1.0).as_text() if loop == "fori_loop" else "func.func"
    assert text.count("func.func") == expected.count("func.func")
