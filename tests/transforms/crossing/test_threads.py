"""Threads may share a function, a model, or both."""

import threading

import jax
import jax.numpy as jnp

import graftree as nnx
from tests import zoo
from tests.static_values import Tag
from tests.threads import run_in_threads
from tests.transforms.crossing.test_repeated_calls import EACH


def in_threads(work, *arguments):
    """Does some work in one thread for each argument."""
    run_in_threads(*[lambda x=x: work(x) for x in arguments])


def multiply(model):
    model.w[...] *= model.factor
    return model.w[...]


@EACH
def test_threads_may_share_a_function(transform, mode):
    call = transform(multiply, **mode)

    def work(model):
        for model.factor in (1, 2, 3, 1, 2):
            call(model)
            call(model)

    models = [zoo.Scale(1.0) for _ in range(4)]
    in_threads(work, *models)
    assert [float(m.w) for m in models] == 4 * [144.0]


def test_threads_may_share_a_function_of_states(mode):
    step = nnx.jit(lambda state: jax.tree.map(lambda x: x * 0.5, state), **mode)

    def work(start):
        state = nnx.State({"a": nnx.Param(jnp.array(start))})
        for _ in range(20):
            state = step(state)
        assert state["a"] == start * 0.5**20

    in_threads(work, 1.0, 2.0, 3.0, 4.0)


def test_threads_may_share_a_model(mode):
    total, model = nnx.jit(lambda model, x: model.w + x, **mode), zoo.Scale()

    def work(offset):
        for x in range(offset, offset + 30):
            assert float(total(model, x)) == 2 + x

    in_threads(work, 0, 100, 200, 300)


def test_a_model_that_another_thread_switches_is_in_one_mode_or_the_other(mode):
    step, model, done = nnx.jit(lambda m: m.w * m.flag, **mode), zoo.Scale(), []
    model.flag = 0

    def switch():
        for count in range(200):
            model.flag = count % 2
        done.append(1)

    def call():
        while not done:
            assert float(step(model)) in (0, 2)

    run_in_threads(switch, call, call)
    for model.flag in (0, 1, 0):
        assert float(step(model)) == 2 * model.flag


def test_threads_that_come_at_once_with_equal_structures_trace_once(mode):
    traces, start = [], threading.Barrier(4)
    step = nnx.jit(lambda model: traces.append(1) or model.w * 2, **mode)

    def come(model):
        start.wait()
        assert step(model) == 4

    equal = [zoo.Box(w=nnx.Param(jnp.array(2.0)), tag=Tag("a")) for _ in range(4)]
    in_threads(come, *equal)
    assert len(traces) == 1
