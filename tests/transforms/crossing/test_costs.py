"""What repeated calls cost: few Python calls, one trace, and no memory.

A call whose arguments are known must not take them apart again. That is seen by the
number of Python functions that it runs: it must not grow with the model.
"""

import gc
import sys
import weakref

import jax
import jax.numpy as jnp
import pytest

import graftree as nnx
from tests import zoo
from tests.changes import variables_in
from tests.modes import GRAPH_UPDATES, TREE
from tests.transforms.crossing.test_repeated_calls import (
    EACH,
    TRACED,
    TRACED_EACH,
)

# The parts of a large model; each has four Variables, an array and a static value.
PARTS = 50
# Less than one Python call for each Variable.
FEW = 3 * PARTS


def large(flag=0):
    return zoo.Box(
        w=nnx.Param(jnp.ones(())),
        flag=flag,
        dropout=nnx.Dropout(0.5),
        parts=nnx.List([zoo.Parts() for _ in range(PARTS)]),
    )


def python_calls(function, *args):
    """How many Python functions run in a call."""
    count = 0

    def note(frame, event, _):
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        function(*args)
    finally:
        sys.setprofile(None)
    return count


def double(model):
    model.w[...] *= 2
    return model.w[...]


def switch(model, k):
    (model.train if k % 2 else model.eval)()


def write(model, k):
    model.w[...] = model.parts[0].array = jnp.full((), float(k))


def set_anew(model, k):
    """Sets values that are equal to earlier ones, and other objects."""
    model.flag = "".join(["te", "xt"]) if k % 2 else float("0.5")


# What happens to a model between two calls.
BETWEEN = {
    "nothing": lambda model, k: None,
    "a mode": switch,
    "new arrays": write,
    "equal static values": set_anew,
    "another object": lambda model, k: zoo.Scale(),
}


@pytest.mark.parametrize("between", BETWEEN)
def test_known_objects_cost_few_python_calls(between, mode):
    traces = []
    step = nnx.jit(lambda model: traces.append(1) or double(model), **mode)
    model = large()
    for k in range(6):
        BETWEEN[between](model, k)
        step(model)
    for k in range(4):
        BETWEEN[between](model, k)
        before = float(model.w)
        assert python_calls(step, model) < FEW and model.w == 2 * before
    assert len(traces) == (2 if between in ("a mode", "equal static values") else 1)


def test_a_switch_inside_is_traced_once_each_way(mode):
    traces, keeps = [], mode == GRAPH_UPDATES

    @nnx.jit(**mode)
    def step(model):
        traces.append(1)
        out, model.flag = model.flag, 1 - model.flag
        return model.w * out

    model = large()
    assert [float(step(model)) for _ in range(6)] == (3 * [0, 1] if keeps else 6 * [0])
    assert len(traces) == 1 + keeps


def test_functions_that_each_have_their_mode_cost_few_python_calls(mode):
    steps, model = [nnx.jit(double, **mode) for _ in range(2)], large()
    for k in range(4):
        for number, step in enumerate(steps):
            switch(model, number)
            assert python_calls(step, model) < FEW or k < 2


def test_other_shapes_and_other_models_cost_few_python_calls(mode):
    step = nnx.jit(lambda model, x: model.w * x, **mode)
    cases = [(model, x) for model in (large(), large()) for x in (jnp.ones(2), 1.0)]
    for k in range(4):
        for model, x in cases:
            assert python_calls(step, model, x) < FEW or k < 2


def test_objects_in_containers_and_bound_ones_cost_few_python_calls(value_mode):
    model, other = large(), large()
    in_pair = nnx.jit(lambda pair, x: pair[0].w * pair[1].w * x, **value_mode)
    bound = nnx.jit_partial(lambda m, x: m.w.set_value(x * 1), model, **value_mode)
    for call in (lambda x: in_pair((model, other), x), bound):
        for x in (1.0, 2.0, 3.0):
            call(x)
        assert python_calls(call, 4.0) < FEW
    assert model.w == 4


def test_new_objects_of_a_known_structure_cost_less_in_tree_mode():
    step, model = nnx.jit(double, **TREE), large()
    for _ in range(3):
        assert step(large()) == 2
    assert python_calls(step, large()) < 10 * 4 * PARTS
    for _ in range(3):
        step(model)
    assert python_calls(step, model) < FEW


def test_new_states_of_a_known_structure_cost_less(mode):
    step = nnx.jit(lambda state: jax.tree.map(lambda x: x * 0.5, state), **mode)
    state = nnx.state([zoo.Scale() for _ in range(4 * PARTS)])
    for _ in range(3):
        state = step(state)
    assert python_calls(step, state) < 10 * 4 * PARTS


@TRACED_EACH
def test_eager_transforms_take_known_objects_apart_once(transform, mode):
    # They are traced each time, which costs more than that.
    call, model = transform(double, **mode), large()
    transform(double, **mode)(large())
    first = python_calls(call, model)
    for k in range(6):
        switch(model, k)
        call(model)
    assert python_calls(call, model) < 0.95 * first and model.w == 2**8


@pytest.mark.parametrize("transform", ["vmap", "grad"])
def test_eager_transforms_take_new_objects_apart_once_in_tree_mode(transform):
    call = TRACED[transform](double, **TREE)
    TRACED[transform](double, **TREE)(large())
    first = python_calls(call, large())
    for _ in range(2):
        call(large())
    assert python_calls(call, large()) < 0.95 * first


# --------------------------------------------------------------------- what is compiled


def test_a_shared_variable_is_one_input_and_only_what_changed_is_an_output(mode):
    def inputs_and_outputs(f, *args):
        jaxpr = nnx.jit(f, **mode).trace(*args).jaxpr
        return len(jaxpr.in_avals), len(jaxpr.out_avals)

    def rewrite(m):
        m.a[...] = m.a.get_value()
        m.b.set_value(m.b.get_value())

    assert inputs_and_outputs(lambda m: m.a.set_value(m.b * 2), zoo.Parts()) == (5, 1)
    assert inputs_and_outputs(rewrite, zoo.Parts()) == (5, 0)
    if mode != TREE:
        w = nnx.Param(jnp.ones(2))
        assert inputs_and_outputs(lambda a, b: a * b[0], w, [w]) == (1, 1)


def test_nothing_is_traced_that_mathematics_does_not_need(mode):
    def f(model, x):
        model.a[...] = model.a * x
        return model.b + x

    step, model = nnx.jit(f, **mode), zoo.Parts()
    text = str(jax.make_jaxpr(lambda x: step(nnx.clone(model), x))(2.0))
    plain = jax.jit(lambda a, b, x: (a * x, b + x))
    wanted = str(jax.make_jaxpr(plain)(jnp.ones(2), jnp.ones(2), 2.0))
    assert text.count(" mul ") == wanted.count(" mul ") == 1
    assert text.count(" add ") == wanted.count(" add ") == 1


# ------------------------------------------------------------------- what is kept alive


def gone(*objects):
    return [weakref.ref(x) for x in objects]


def all_gone(references):
    return [ref() for ref in references] == [None] * len(references)


@EACH
def test_dropped_models_are_freed_at_once(transform, mode):
    call, kept = transform(double, **mode), zoo.Box(w=nnx.Param(jnp.ones(())))
    model = zoo.Box(w=nnx.Param(jnp.ones(())), parts=zoo.Parts())
    for _ in range(2):
        for k in range(2):
            switch(model, k)
            call(model)
            call(kept)
    replaced = gone(model.w, model.parts.array)
    model.w, model.parts.array = nnx.Param(jnp.ones(())), jnp.zeros(2)
    call(model)
    assert all_gone(replaced)
    dropped = gone(model, model.w, model.parts)
    del model
    gc.collect() if transform is not nnx.jit else None
    assert all_gone(dropped)
    call(kept)


def test_new_objects_and_states_are_freed(mode):
    step = nnx.jit(double, **mode)
    halve = nnx.jit(lambda state: jax.tree.map(lambda x: x * 0.5, state), **mode)
    state, dropped = nnx.state(zoo.Parts(), nnx.Variable), []
    for _ in range(3):
        model = zoo.Scale()
        step(model)
        dropped += gone(model, model.w, *variables_in(state))
        state = halve(state)
    del model
    gc.collect()
    assert all_gone(dropped)


def test_models_with_references_back_are_freed():
    step, model = nnx.jit(lambda model: model.a.sum()), zoo.Tied()
    for _ in range(3):
        step(model)
    dropped = gone(model, model.a, model.child)
    del model
    gc.collect()
    assert all_gone(dropped)


def test_dropped_functions_are_freed():
    model, step = zoo.Scale(), nnx.jit(double)
    for _ in range(3):
        step(model)
    dropped = gone(step)
    del step
    gc.collect()
    assert all_gone(dropped)
