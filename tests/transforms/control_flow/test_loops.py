"""`while_loop` and `fori_loop`: the same objects in every step, as in a `scan`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import comparisons, zoo
from tests.modes import GRAPH_UPDATES

LOOPS = pytest.mark.parametrize("loop", ["while_loop", "fori_loop"])
WITH_SCAN = pytest.mark.parametrize("loop", ["while_loop", "fori_loop", "scan"])


def pair():
    return zoo.Box(a=nnx.Variable(jnp.array(0.0)), b=nnx.Variable(jnp.array(1.0)))


def run(loop, body, value, count=3, **mode):
    """The body ``count`` times, in any loop."""
    if loop == "fori_loop":
        return nnx.fori_loop(0, count, lambda i, value: body(value), value, **mode)
    if loop == "scan":
        axes = {"in_axes": nnx.Carry, "out_axes": nnx.Carry}
        return nnx.scan(body, length=count, **axes, **mode)(value)

    def step(state):
        number, value = state
        return number + 1, body(value)

    return nnx.while_loop(lambda state: state[0] < count, step, (0, value), **mode)[1]


@WITH_SCAN
@pytest.mark.parametrize("count", [3, 0])
def test_updates_reach_the_callers_objects(loop, count, mode):
    model = zoo.Box(
        a=nnx.Variable(jnp.array(0.0)), b=nnx.Variable(jnp.array(1.0)), c=jnp.array(1.0)
    )

    def body(model):
        model.a[...] += model.b
        model.c = model.c * 2
        return model

    out = run(loop, body, model, count, **mode)
    assert model.a[...] == count and out.c == 2**count
    assert model.c == (2**count if mode is GRAPH_UPDATES else 1)
    assert (out is model) == (mode is GRAPH_UPDATES)
    assert out.a is model.a and out.b is model.b


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

    for bounds, expected in (((2, 5), 9), ((jnp.array(2), np.int32(5)), 18)):
        nnx.fori_loop(*bounds, add, total, **mode)
        assert total[...] == expected


def test_bounds_may_be_traced_or_known_for_a_derivative_in_reverse(mode):
    def power(x, n):
        return nnx.fori_loop(0, n, lambda i, y: x * y, 1.0, **mode)

    assert jax.jit(power)(2.0, 5) == 32
    assert jax.grad(lambda x: power(x, 3))(2.0) == 12


@WITH_SCAN
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


PLAIN = {
    "while_loop": lambda x: jax.lax.while_loop(
        lambda state: state[0] < 3, lambda state: (state[0] + 1, state[1] * 2), (0, x)
    ),
    "fori_loop": lambda x: jax.lax.fori_loop(0, 3, lambda i, x: x * 2, x),
    "scan": lambda x: jax.lax.scan(lambda x, _: (x * 2, None), x, length=3),
}


@WITH_SCAN
def test_nothing_is_around_the_loop_that_jax_compiles(loop, mode):
    def f(x):
        return run(loop, lambda x: x * 2, x, **mode)

    ours, theirs = (jax.jit(g).lower(1.0).as_text() for g in (f, PLAIN[loop]))
    assert ours.count("func.func") == theirs.count("func.func")
