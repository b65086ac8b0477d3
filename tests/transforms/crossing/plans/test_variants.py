"""Objects whose static attributes take turns are taken apart once for each value."""

import gc
import logging
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
from hypothesis import given
from hypothesis import strategies as st

import graftree as nnx
from graftree.core.graph import flattening, freshness
from tests import strategies
from tests.modes import BY_NAME, TREE
from tests.static_values import Tag
from tests.threads import run_in_threads

X = jnp.arange(1.0, 9.0).reshape(4, 2)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(2, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(x))


class Model(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.scale = nnx.Param(jnp.ones(()))
        self.array = jnp.ones(())
        self.flag = 0
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.scale * x * self.array


def apply(model, x):
    return model(x)


def read_flag(model):
    return model.scale * model.array * number(model.flag)


def number(x):
    """A number for any static value; equal ones of two types have two."""
    return sum(repr(x).encode())


def unplanned(step, *args):
    """A call of a jitted function that takes its arguments apart itself."""
    call = step.prepare(args, {})
    return call.commit(step.jitted_fn(*call.groups))


def test_switched_models_are_taken_apart_once_in_each_mode(mode, packs):
    step, model = nnx.jit(apply, **mode), Model()
    step(model, X)
    for _ in range(3):
        model.train()
        assert (step(model, X) == 0).any()
        model.eval()
        assert (step(model, X) != 0).all()
    assert len(packs) == 3  # the first time it comes there is no plan
    assert step.traces.count == 2


def test_no_skeleton_is_made_of_a_model_in_a_mode_that_is_known(mode, monkeypatch):
    step, model = nnx.jit(apply, **mode), Model()

    def switch_and_call():
        model.train()
        step(model, X)
        model.eval()
        step(model, X)

    switch_and_call()
    switch_and_call()
    count = []
    flatten = flattening.flatten_graph
    monkeypatch.setattr(
        flattening, "flatten_graph", lambda *a: count.append(1) or flatten(*a)
    )
    monkeypatch.setattr(nnx.GraphDef, "__eq__", lambda *_: count.append(1))
    monkeypatch.setattr(nnx.GraphDef, "__hash__", lambda *_: count.append(1))
    switch_and_call()
    assert count == []
    model.flag = 1
    step(model, X)
    assert count


def test_functions_that_each_have_their_mode_keep_their_plan(mode, packs):
    train, evaluate = nnx.jit(apply, **mode), nnx.jit(apply, **mode)
    model = Model()
    for _ in range(4):
        model.train()
        assert (train(model, X) == 0).any()
        model.eval()
        assert (evaluate(model, X) != 0).all()
    assert len(packs) == 4


def test_train_steps_and_evaluations_in_turns_equal_unplanned_ones(mode):
    def train(planned):
        model = Model()
        optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)

        def step(model, optimizer, x):
            def loss(params, rest):
                return jnp.mean((nnx.merge(graphdef, params, rest)(x) - 1.0) ** 2)

            graphdef, params, rest = nnx.split(model, nnx.Param, ...)
            value, grads = nnx.value_and_grad(loss, **mode)(params, rest)
            nnx.update(model, rest)
            optimizer.update(model, grads)
            return value

        step, evaluate = nnx.jit(step, **mode), nnx.jit(apply, **mode)
        call = (lambda f, *args: f(*args)) if planned else unplanned
        found = []
        for _ in range(4):
            model.train()
            found.append(call(step, model, optimizer, X))
            model.eval()
            found.append(call(evaluate, model, X))
        return found, nnx.state(model, (nnx.Param, nnx.BatchStat))

    jax.tree.map(np.testing.assert_array_equal, train(True), train(False))


EQUALS = (1, True, 1.0, 0, False, 0.0, -0.0, "1", None, (1,), (True,))


def test_values_that_python_takes_for_equal_are_told_apart(mode):
    step, model = nnx.jit(read_flag, **mode), Model()
    for _ in range(2):
        for value in EQUALS:
            model.flag = value
            assert float(step(model)) == number(value)
    assert step.traces.count == len(EQUALS)


def test_equal_values_made_anew_follow_the_same_plan(mode, packs):
    step, model = nnx.jit(read_flag, **mode), Model()
    for _ in range(4):
        model.flag = float("0.5")
        assert float(step(model)) == number(0.5)
        model.flag = "".join(["te", "xt"])
        assert float(step(model)) == number("text")
    assert len(packs) == 3


def test_static_values_that_change_in_place_are_compared(mode):
    step = nnx.jit(lambda model: model.scale * number(model.flag.name), **mode)
    model, tags = Model(), [Tag("a"), Tag("b")]
    for name in "aacca":
        tags[0].name = name
        for tag in tags:
            model.flag = tag
            assert float(step(model)) == number(tag.name)


def test_arrays_and_values_are_those_of_now(mode):
    step, model = nnx.jit(read_flag, **mode), Model()
    for count in range(6):
        model.flag = model.scale[...] = count % 2
        model.array = jnp.full((), float(count))
        assert float(step(model)) == count % 2 * count * number(count % 2)


def test_a_toggle_inside_a_function_finds_its_plan(mode, packs):
    @nnx.jit(**mode)
    def step(model):
        out = read_flag(model)
        model.flag = 1 - model.flag
        return out

    model = Model()
    found = [float(step(model)) for _ in range(6)]
    changes = mode.get("graph_updates", False)
    assert found == [number(k % 2 if changes else 0) for k in range(6)]
    assert len(packs) == (3 if changes else 2)


def test_the_number_of_variants_is_bounded(mode, packs):
    step, model = nnx.jit(read_flag, **mode), Model()
    for value in range(freshness.VARIANTS + 4):
        model.flag = value
        assert float(step(model)) == number(value)
    packs.clear()
    for value in range(4, freshness.VARIANTS + 4):
        model.flag = value
        assert float(step(model)) == number(value)
    assert packs == []
    (plans,) = step._plans._known.values()
    assert len(plans) == freshness.VARIANTS


def test_variants_are_freed_with_the_model_and_with_what_is_replaced(mode):
    step, model = nnx.jit(apply, **mode), Model()
    for _ in range(2):
        model.train()
        step(model, X)
        model.eval()
        step(model, X)
    replaced = [weakref.ref(x) for x in (model.scale, model.array)]
    model.scale, model.array = nnx.Param(jnp.ones(())), jnp.zeros(())
    step(model, X)
    assert [x() for x in replaced] == [None] * 2
    model.train()
    step(model, X)
    gone = [weakref.ref(x) for x in (model, model.scale, model.blocks[0])]
    del model
    assert [x() for x in gone] == [None] * 3


def test_a_model_that_is_switched_and_changed_is_taken_apart(mode):
    changes = (
        lambda m: setattr(m, "scale", nnx.Param(jnp.full((), 3.0))),
        lambda m: setattr(m, "flag", jnp.ones(())),
        lambda m: m.blocks.pop(),
        lambda m: setattr(m.blocks[0], "norm", nnx.BatchNorm(2, rngs=nnx.Rngs(0))),
        lambda m: m.scale.set_metadata(tag=1),
        lambda m: setattr(m.blocks[1], "dropout", m.blocks[0].dropout),
    )
    for change in changes:
        if mode is TREE and change is changes[-1]:
            continue  # an alias
        step, model = nnx.jit(apply, **mode), Model()
        if change is changes[1]:
            del model.flag
        for _ in range(2):
            model.train()
            step(model, X)
            model.eval()
            step(model, X)
        change(model)
        for switch in (model.eval, model.train, model.eval):
            switch()
            state = jax.tree.map(jnp.copy, nnx.state(model))
            out = step(model, X)
            nnx.update(model, state)
            np.testing.assert_array_equal(out, unplanned(step, model, X))


def test_the_logger_tells_of_a_counter_and_recompilations_are_explained(mode):
    messages, handler = [], logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("graftree")
    logger.addHandler(handler)
    step, model = nnx.jit(read_flag, **mode), Model()
    for _ in range(5):
        model.flag += 1
        step(model)
    logger.removeHandler(handler)
    assert len(messages) == 1 and "model.flag" in messages[0]
    assert "model.flag" in str(nnx.debugging.explain_recompile(step))


# Random changes of several objects, which share one.


class Node(nnx.Module):
    def __init__(self, shared):
        self.flag, self.name = 0, "a"
        self.scale = nnx.Param(jnp.ones(()))
        self.array = jnp.ones(())
        self.own, self.shared = nnx.Dict(flag=0), shared


CHANGES = (
    *(lambda m, v=v: setattr(m, "flag", v) for v in (0, False, 0.0, -0.0, 1)),
    *(lambda m, v=v: setattr(m.own, "flag", v) for v in (0, False, 1)),
    *(lambda m, v=v: setattr(m.shared, "flag", v) for v in (0, True, 1)),
    lambda m: vars(m).update(name="a"),
    lambda m: vars(m).update(name="b"),
    lambda m: setattr(m, "array", jnp.full((), 2.0)),
    lambda m: m.scale.set_value(jnp.full((), 2.0)),
    lambda m: setattr(m, "scale", nnx.Param(jnp.full((), 3.0))),
    lambda m: setattr(m, "own", nnx.Dict(flag=1)),
    lambda m: setattr(m, "name", nnx.static("a")),
    lambda m: m.scale.set_metadata(tag=1),
    lambda m: setattr(m, "__dict__", dict(vars(m))),
    nnx.touch,
)


def visit(models, factor, third, box, x):
    total = x + box[...]
    for place, model in enumerate((*models["models"], third)):
        statics = model.flag, model.name, model.own.flag, model.shared.flag
        statics += (model.scale.get_metadata().get("tag"), place)
        total += model.scale * model.array * number(statics)
        model.scale[...] += factor
    box[...] += 1
    return total


VISITS = {
    tuple(mode.items()): nnx.jit(visit, static_argnums=1, donate_argnums=3, **mode)
    for mode in BY_NAME.values()
}


@strategies.examples(5, 60)
@given(data=st.data())
def test_calls_with_several_objects_equal_unplanned_ones(mode, data):
    def objects():
        shared = [nnx.Dict(flag=0) for _ in range(3)]
        if mode is not TREE:
            shared = shared[:1] * 3
        return [*map(Node, shared)], nnx.Variable(jnp.zeros(()))

    step = VISITS[tuple(mode.items())]
    (ours, our_box), (theirs, their_box) = objects(), objects()

    def compare(factor):
        args = {"models": ours[:2]}, factor, ours[2], our_box, 1.0
        others = {"models": theirs[:2]}, factor, theirs[2], their_box, 1.0
        np.testing.assert_array_equal(step(*args), unplanned(step, *others))

    changes = st.tuples(st.sampled_from(CHANGES), st.integers(0, 2), st.booleans())
    compare(1)
    for change, place, also in data.draw(st.lists(changes, min_size=3, max_size=12)):
        change(ours[place])
        change(theirs[place])
        if also:
            compare(1)
    compare(2)
    for one, other in zip(ours, theirs, strict=True):
        assert nnx.graphdef(one) == nnx.graphdef(other)
        jax.tree.map(np.testing.assert_array_equal, nnx.state(one), nnx.state(other))


# Threads.


def test_threads_may_switch_their_models(mode):
    step = nnx.jit(read_flag, **mode)

    def work(model):
        for count in range(40):
            model.flag = count % 3
            assert float(step(model)) == number(count % 3)

    models = [Model() for _ in range(4)]
    run_in_threads(*[lambda m=m: work(m) for m in models])


def test_a_model_that_another_thread_switches_is_in_one_mode_or_the_other(mode):
    step, model = nnx.jit(read_flag, **mode), Model()
    done = []

    def switch():
        for count in range(200):
            model.flag = count % 2
        done.append(1)

    def call():
        while not done:
            assert float(step(model)) in (number(0), number(1))

    run_in_threads(switch, call, call)
    for value in (0, 1, 0):
        model.flag = value
        assert float(step(model)) == number(value)
    gc.collect()
