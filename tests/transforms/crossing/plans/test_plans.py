"""Calls that follow a plan do what calls without one do."""

import gc
import weakref
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import graftree as nnx
from graftree.core.graph import freshness
from graftree.transforms.compiled import jit
from graftree.transforms.crossing.plans import plans
from graftree.transforms.crossing.signatures import Signature
from tests import strategies
from tests.modes import GRAPH, GRAPH_UPDATES, TREE
from tests.static_values import Tag
from tests.threads import run_in_threads


class Model(nnx.Module):
    def __init__(self):
        self.kernel = nnx.Param(jnp.ones(2))
        self.array = jnp.arange(3.0)
        self.tag = Tag("a")
        self.flag = 0
        self.dropout = nnx.Dropout(0.5)
        self.layers = nnx.List([nnx.Linear(2, 2, rngs=nnx.Rngs(0))])
        self.heads = nnx.Dict(a=nnx.Param(jnp.ones(1)))
        self.items = nnx.data([nnx.Param(jnp.ones(1)), 2])
        self.named = nnx.data({"x": nnx.Param(jnp.ones(1))})
        self.state = nnx.data(nnx.State({"a": {"b": nnx.Param(jnp.ones(1))}}))


def weight(x: Any) -> float:
    """A number for any static value."""
    return zlib.crc32(repr(x).encode()) % 97 / 97


def visit(model):
    """Depends on all structure and all values of a Model, and writes all Variables."""
    total = 0.0
    for path, leaf in nnx.to_flat_state(nnx.state(model)):
        is_variable = isinstance(leaf, nnx.Variable)
        value = leaf.get_value() if is_variable else leaf
        kind = (type(leaf), leaf.get_metadata().get("tag")) if is_variable else None
        value = value * weight((path, kind))
        total += value.sum()
        if isinstance(leaf, nnx.Variable):
            leaf.set_value(value)
    statics = getattr(model, "tag", Tag("")).name, len(model.layers), model.items[1:]
    statics = [x for x in statics if not isinstance(x, list)]
    statics += [repr((model.flag, model.dropout.deterministic))]
    statics += [x for x in model.items if not isinstance(x, nnx.Variable)]
    return total + sum(map(weight, statics))


SWITCHES = (
    lambda m, k: m.eval() if k else m.train(),
    lambda m, k: setattr(m, "flag", k),
    lambda m, k: setattr(m, "flag", float(k)),
    lambda m, k: setattr(m, "flag", -0.0 if k else False),
)
MUTATIONS = (
    lambda m, k: m.kernel.set_value(jnp.full(2, float(k))),
    lambda m, k: m.kernel.set_value(jnp.full(k + 1, 2.0)),
    lambda m, k: setattr(m, "array", jnp.full(3, float(k))),
    lambda m, k: setattr(m, "array", jnp.full(k + 1, 2, jnp.int32)),
    lambda m, k: setattr(m, "kernel", nnx.Param(jnp.full(2, float(k)))),
    lambda m, k: setattr(m, "kernel", nnx.Cache(m.kernel.get_value())),
    lambda m, k: m.kernel.set_metadata(tag=k),
    lambda m, k: setattr(m, "tag", Tag(str(k))),
    lambda m, k: setattr(m.tag, "name", str(k)) if hasattr(m, "tag") else None,
    lambda m, k: delattr(m, "tag") if hasattr(m, "tag") else None,
    lambda m, k: setattr(m, f"new{k}", nnx.Param(jnp.full(1, float(k)))),
    lambda m, k: setattr(m, f"size{k}", k),
    lambda m, k: setattr(m.layers[0], "bias", None) if len(m.layers) else None,
    lambda m, k: m.layers.append(nnx.Linear(2, k + 1, rngs=nnx.Rngs(k))),
    lambda m, k: m.layers.insert(0, nnx.Linear(2, 2, rngs=nnx.Rngs(k))),
    lambda m, k: m.layers.pop() if len(m.layers) else None,
    lambda m, k: m.layers.reverse(),
    lambda m, k: m.heads.__setitem__(str(k), nnx.Param(jnp.full(1, float(k)))),
    lambda m, k: m.heads.pop(str(k), None),
    lambda m, k: m.items.append(nnx.Param(jnp.full(1, float(k)))),
    lambda m, k: m.items.append(k),
    lambda m, k: m.items.__setitem__(0, nnx.Param(jnp.ones(1))),
    lambda m, k: m.items.pop() if len(m.items) > 1 else None,
    lambda m, k: m.named.__setitem__(str(k), nnx.Param(jnp.ones(1))),
    lambda m, k: m.named.__setitem__("x", nnx.Param(jnp.ones(1))),
    lambda m, k: m.named.__setitem__("x", jnp.ones(1)),
    lambda m, k: m.state["a"].__setitem__("b", nnx.Param(jnp.full(1, float(k)))),
    lambda m, k: m.state["a"].__setitem__(str(k), nnx.Param(jnp.ones(1))),
    *SWITCHES,
    lambda m, k: nnx.update(m, nnx.state(m)),
    lambda m, k: nnx.Linear(1, 1, rngs=nnx.Rngs(0)),
    lambda m, k: None,
)


def unplanned(step, *args):
    """A call of a jitted function that takes its arguments apart itself."""
    call = step.prepare(args, {})
    return call.commit(step.jitted_fn(*call.groups))


# One for all examples, so that little is compiled.
VISITS = {
    tuple(mode.items()): nnx.jit(visit, **mode) for mode in (GRAPH_UPDATES, GRAPH, TREE)
}


@pytest.mark.parametrize("often", [1, 6], ids=["any", "switches"])
@strategies.examples(5, 25)
@given(data=st.data())
def test_planned_calls_equal_unplanned_ones(mode, often, data):
    step = VISITS[tuple(mode.items())]
    ours, theirs = Model(), Model()
    mutations = st.sampled_from((*MUTATIONS, *SWITCHES * (often - 1)))
    steps = st.tuples(mutations, st.integers(0, 1))
    for mutate, k in data.draw(st.lists(steps, min_size=1, max_size=6 + often)):
        for _ in range(data.draw(st.integers(1, 3))):
            np.testing.assert_array_equal(step(ours), unplanned(step, theirs))
        mutate(ours, k)
        mutate(theirs, k)
    np.testing.assert_array_equal(step(ours), unplanned(step, theirs))
    ours_def, ours_state = nnx.split(ours, graph=True)
    theirs_def, theirs_state = nnx.split(theirs, graph=True)
    assert ours_def == theirs_def
    jax.tree.map(np.testing.assert_array_equal, ours_state, theirs_state)


def double(model):
    model.kernel[...] *= 2
    return jnp.sum(model.kernel[...])


def test_unchanged_objects_are_packed_twice(mode, packs):
    step = nnx.jit(double, **mode)
    model = Model()
    for _ in range(2):
        step(model)
    first = len(packs)
    for _ in range(3):
        nnx.Linear(1, 1, rngs=nnx.Rngs(0))  # others may change meanwhile
        model.layers[0].kernel[...] = jnp.zeros((2, 2))
        model.array = jnp.ones(3)
        step(model)
    assert len(packs) == first
    np.testing.assert_array_equal(model.kernel[...], 32 * np.ones(2))


def test_signatures_are_those_that_jax_knows(mode, monkeypatch):
    step = nnx.jit(double, **mode)
    models = [Model(), Model()]
    for model in models:
        for _ in range(3):
            step(model)
    compared = []
    monkeypatch.setattr(Signature, "__eq__", lambda *_: compared.append(1))
    for model in models:
        step(model)
    assert compared == []


def test_plans_take_objects_wherever_they_are(mode, packs):
    @nnx.jit(static_argnums=1, donate_argnums=2, **mode)
    def step(tree, factor, donated, *, other, x):
        for model in (*tree["models"], donated, other):
            model.kernel[...] *= factor
        return x + tree["x"]

    models = [Model() for _ in range(4)]
    tree = {"models": models[:2], "x": jnp.ones(1)}
    for count in range(1, 4):
        out = step(tree, 3.0, models[2], other=models[3], x=count)
        np.testing.assert_array_equal(out, [1.0 + count])
        for model in models:
            np.testing.assert_array_equal(model.kernel[...], 3.0**count * np.ones(2))
    assert len(packs) == 2
    step(tree, 2.0, models[2], other=models[3], x=0)
    np.testing.assert_array_equal(models[0].kernel[...], 54 * np.ones(2))
    step({"models": models[1::-1], "x": 0}, 2.0, models[3], other=models[2], x=0)
    np.testing.assert_array_equal(models[3].kernel[...], 108 * np.ones(2))


def test_new_shapes_follow_the_same_plan(mode, packs):
    @nnx.jit(**mode)
    def step(model, x):
        if x.ndim:
            model.kernel[...] += 1
        else:
            model.heads["a"][...] += 1
        return x

    model = Model()
    for x in 3 * (jnp.ones(3), jnp.ones(())):
        step(model, x)
    assert len(packs) == 2
    np.testing.assert_array_equal(model.kernel[...], [4.0, 4.0])
    np.testing.assert_array_equal(model.heads["a"][...], [4.0])


def test_plans_leave_nothing_behind_after_an_exception(mode):
    @nnx.jit(**mode)
    def step(model, x):
        model.kernel[...] *= 2
        if x.ndim:
            raise RuntimeError("no")

    model = Model()
    for _ in range(3):
        step(model, jnp.ones(()))
    with pytest.raises(RuntimeError, match="no"):
        step(model, jnp.ones(1))
    np.testing.assert_array_equal(model.kernel[...], [8.0, 8.0])
    step(model, jnp.ones(()))
    np.testing.assert_array_equal(model.kernel[...], [16.0, 16.0])


def test_structure_changes_and_returned_objects_are_committed_by_a_plan():
    @nnx.jit
    def step(model, x):
        model.kernel[...] += 1
        model.count = jnp.asarray(x)
        new = nnx.Param(model.kernel[...])
        return model, model.layers[0], new

    model = Model()
    model.count = jnp.array(0)
    for count in range(3):
        same, layer, new = step(model, jnp.array(count))
        assert same is model
        assert layer is model.layers[0]
        assert int(model.count) == count
        np.testing.assert_array_equal(new[...], model.kernel[...])
        assert new is not model.kernel


def test_metadata_changes_are_committed_by_a_plan():
    @nnx.jit
    def step(model, x):
        model.kernel.set_metadata(dim=x.ndim)

    model = Model()
    for x in 3 * (jnp.ones(()), jnp.ones(()), jnp.ones(1)):
        step(model, x)
        assert model.kernel.dim == x.ndim


def test_refs_and_read_only_variables_go_through_plans(mode):
    @nnx.jit(**mode)
    def step(model):
        model.kernel[...] *= 2
        return model.heads["a"][...]

    model = nnx.to_refs(Model())
    for _ in range(3):
        step(model)
    np.testing.assert_array_equal(model.kernel[...], [8.0, 8.0])
    model = Model()
    model.heads = nnx.with_vars(model.heads, mutable=False)
    for _ in range(3):
        step(model)
    np.testing.assert_array_equal(model.kernel[...], [8.0, 8.0])
    model.kernel = nnx.with_vars(model.kernel, mutable=False)
    for _ in range(2):
        with pytest.raises(nnx.errors.ImmutableVariableError):
            step(model)


def test_filters_that_look_at_values_are_asked_at_each_call():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    split, whole = (jax.sharding.NamedSharding(mesh, s) for s in (spec("x"), spec()))
    shardings = nnx.StateSharding({(lambda _, v: v.shape == (2,)): split, ...: whole})

    @nnx.jit(in_shardings=(shardings,))
    def step(model):
        model.kernel[...] += 1

    model = nnx.Module()
    model.kernel = nnx.Param(jnp.ones(2))
    for _ in range(3):
        step(model)
    assert model.kernel[...].sharding.is_equivalent_to(split, 1)
    model.kernel.set_value(jnp.ones(3))
    step(model)
    assert model.kernel[...].sharding.is_equivalent_to(whole, 1)


def test_objects_under_other_transforms_have_no_plan(mode, packs):
    scale = nnx.jit(lambda model, x: model.kernel[...] * x, **mode)
    model = Model()
    for _ in range(2):
        grads = jax.vmap(jax.grad(lambda x: jnp.sum(scale(model, x))))(jnp.ones(3))
        np.testing.assert_array_equal(grads, [2.0, 2.0, 2.0])
    assert len(packs) == 2


def test_copies_of_vars_are_not_taken_for_the_object():
    model = Model()
    other = object.__new__(Model)
    vars(other).update(vars(model))
    vars(other)["kernel"] = nnx.Param(jnp.zeros(2))
    total = nnx.jit(lambda model: jnp.sum(model.kernel[...]))
    assert [float(total(m)) for m in 3 * (model, other)] == 3 * [2, 0]


# What plans hold.


def test_dropped_models_are_freed_at_once(mode):
    step = nnx.jit(double, **mode)
    model, kept = Model(), Model()
    for _ in range(3):
        step(model)
        step(kept)
    gone = [weakref.ref(x) for x in (model, model.kernel, model.layers[0].kernel)]
    del model
    assert [ref() for ref in gone] == [None] * 3
    step(kept)


def test_models_with_references_back_are_freed():
    step = nnx.jit(lambda model: jnp.sum(model.kernel[...]))
    model, child = nnx.Module(), nnx.Module()
    model.kernel = child.kernel = nnx.Param(jnp.ones(1))
    model.children = nnx.data([child])
    child.parent = model
    for _ in range(3):
        step(model)
    gone = weakref.ref(model.kernel)
    del model, child
    gc.collect()
    assert gone() is None


def test_dropped_functions_are_freed():
    model = Model()
    step = nnx.jit(double)
    for _ in range(3):
        step(model)
    gone = weakref.ref(step)
    del step
    gc.collect()
    assert gone() is None


def test_the_number_of_plans_is_bounded():
    step = nnx.jit(lambda model: model.kernel[...] + 1)
    models = [nnx.Module() for _ in range(plans.LIMIT + 3)]
    for model in models:
        model.kernel = nnx.Param(jnp.ones(1))
    for _ in range(3):
        for model in models:
            np.testing.assert_array_equal(step(model), [2.0])


# Threads.


def check_in_threads(call, rounds):
    """Calls that double a kernel, in threads, with plans that are made anew."""
    models = [Model() for _ in range(4)]

    def work(model):
        for count in range(rounds):
            model.extra = count
            call(model)
            call(model)

    run_in_threads(*[lambda m=m: work(m) for m in models])
    for model in models:
        np.testing.assert_array_equal(model.kernel[...], 4.0**rounds * np.ones(2))


def test_threads_may_share_a_function(mode):
    check_in_threads(nnx.jit(double, **mode), 20)


def test_threads_may_share_a_model(mode):
    total = nnx.jit(lambda model, x: jnp.sum(model.kernel[...]) + x, **mode)
    model = Model()

    def work(offset):
        for x in range(30):
            assert float(total(model, x + offset)) == 2 + x + offset

    run_in_threads(*[lambda i=i: work(100 * i) for i in range(4)])


# The train step, as in the benchmarks.


@pytest.mark.parametrize("donated", [(), (0, 1)], ids=["plain", "donated"])
def test_train_step_equals_the_unplanned_one(mode, donated):
    def train(make):
        model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
        losses = [make()(model, optimizer, jnp.ones((4, 2))) for _ in range(4)]
        return jnp.stack(losses), nnx.state(model)

    def step(model, optimizer, x):
        def loss(model):
            return jnp.mean(model(x) ** 2)

        value, grads = nnx.value_and_grad(loss, **mode)(model)
        optimizer.update(model, grads)
        return value

    one = nnx.jit(step, donate_argnums=donated, **mode)
    planned = train(lambda: one)
    unplanned = train(lambda: nnx.jit(step, **mode))
    jax.tree.map(np.testing.assert_array_equal, planned, unplanned)


def test_partial_functions_follow_plans_of_what_is_bound(packs):
    model = Model()
    step = nnx.jit_partial(
        lambda model, x: model.kernel.set_value(model.kernel[...] * x),
        model,
        graph=False,
    )
    packs.clear()
    for x in (1.0, 2.0, 3.0):
        step(x)
    assert len(packs) == 2
    np.testing.assert_array_equal(model.kernel[...], [6.0, 6.0])
    assert isinstance(step, jit.JitWrapped)


def test_captures_are_seen_by_plans():
    class Sower(nnx.Module):
        def __init__(self):
            self.kernel = nnx.Param(jnp.ones(1))

        def __call__(self, x):
            self.sow(nnx.Intermediate, "x", x, capture_noop=True)
            return self.kernel * x

    step = nnx.jit(lambda model, x: model(x))
    model = Sower()
    captured = nnx.capture(step, nnx.Intermediate)
    with_outputs = nnx.capture(step, nnx.Intermediate, method_outputs=nnx.Intermediate)
    for x in range(4):
        assert step(model, float(x)) == x
        assert captured(model, float(x))[1]["x"].get_value() == (x,)
        assert "__call__" in with_outputs(model, float(x))[1]


def test_a_call_survives_a_change_by_another_thread_before_it_is_planned(monkeypatch):
    model = nnx.Dict(weight=jnp.array(2.0), extra=nnx.Dict(array=jnp.array(1.0)))
    double = nnx.jit(lambda model: model.weight * 2)
    double(model)
    attribute_at = freshness.attribute_at

    def interrupted(root, path):
        if hasattr(model, "extra"):
            del model.extra
        return attribute_at(root, path)

    monkeypatch.setattr(freshness, "attribute_at", interrupted)
    assert double(model) == 4  # the second call makes a plan
    monkeypatch.undo()
    model.weight = jnp.array(3.0)
    assert double(model) == double(model) == 6
