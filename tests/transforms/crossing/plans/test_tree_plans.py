"""In tree mode, calls with new objects do what calls without a plan do."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import graftree as nnx
from graftree.core.graph import tree_checks
from graftree.transforms.crossing.plans import tree_plans
from tests import strategies
from tests.modes import TREE
from tests.static_values import Tag
from tests.transforms.crossing.plans.test_plans import (
    MUTATIONS,
    Model,
    unplanned,
    visit,
)

VISIT = nnx.jit(visit, **TREE)


@strategies.examples(8, 40)
@given(data=st.data())
def test_calls_with_new_objects_equal_unplanned_ones(data):
    steps = st.tuples(st.sampled_from(MUTATIONS), st.integers(0, 1))
    mutations = data.draw(st.lists(steps, max_size=4))

    def make():
        model = Model()
        for mutate, k in mutations:
            mutate(model, k)
        return model

    for _ in range(3):
        ours, theirs = make(), make()
        np.testing.assert_array_equal(VISIT(ours), unplanned(VISIT, theirs))
        ours_def, ours_state = nnx.split(ours, graph=True)
        theirs_def, theirs_state = nnx.split(theirs, graph=True)
        assert ours_def == theirs_def
        jax.tree.map(np.testing.assert_array_equal, ours_state, theirs_state)


class Scale(nnx.Module):
    def __init__(self, factor=2.0, tag="a"):
        self.factor = nnx.Param(jnp.full(2, factor))
        self.shift = jnp.full(2, factor)
        self.tag = Tag(tag)


def double(model, x):
    model.factor[...] *= 2
    return x * model.factor[...] + model.shift


def test_new_objects_are_packed_once(packs):
    step = nnx.jit(double, **TREE)
    for factor in (1.0, 2.0, 3.0, 4.0):
        model = Scale(factor)
        np.testing.assert_array_equal(step(model, 1), np.full(2, 3 * factor))
        np.testing.assert_array_equal(model.factor[...], np.full(2, 2 * factor))
    assert len(packs) == 1


def test_objects_that_come_again_have_plans_of_their_own(packs, monkeypatch):
    step = nnx.jit(double, **TREE)
    step(Scale(), 1)
    model = Scale()
    step(model, 1)  # as one of many
    step(model, 1)
    monkeypatch.setattr(tree_checks, "flatten", None)
    step(model, 1)
    np.testing.assert_array_equal(model.factor[...], [16.0, 16.0])
    assert len(packs) == 2


def test_objects_are_taken_wherever_they_are(packs):
    @nnx.jit(static_argnums=1, donate_argnums=2, **TREE)
    def step(tree, factor, donated, *, other, x):
        for model in (*tree["models"], donated, other):
            model.factor[...] *= factor
        tree["box"][...] += x
        return nnx.Param(other.shift), tree["x"]

    for count in range(3):
        models = [Scale(count + 1.0) for _ in range(4)]
        box = nnx.Param(jnp.zeros(()))
        tree = {"models": models[:2], "x": jnp.ones(1), "box": box}
        new, x = step(tree, 3.0, models[2], other=models[3], x=count)
        np.testing.assert_array_equal(new[...], np.full(2, count + 1.0))
        np.testing.assert_array_equal(x, [1.0])
        assert box[...] == count
        for model in models:
            np.testing.assert_array_equal(model.factor[...], np.full(2, 3 * count + 3))
    assert len(packs) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model, "tag", Tag("b")),
        lambda model: setattr(model.tag, "name", "b"),
        lambda model: setattr(model, "shift", nnx.Param(jnp.ones(2))),
        lambda model: setattr(model, "factor", nnx.Cache(jnp.ones(2))),
        lambda model: setattr(model, "factor", jnp.ones(2)),
        lambda model: model.factor.set_metadata(tag="b"),
    ],
)
def test_what_differs_is_traced_anew(change):
    def facts(model):
        is_tagged = getattr(model.factor, "tag", None)
        return type(model.factor), type(model.shift), model.tag.name, is_tagged

    seen = []
    step = nnx.jit(lambda model: seen.append(facts(model)), **TREE)
    like, other = Scale(), Scale()
    change(other)
    for model in (Scale(), like, other, Scale()):
        step(model)
    assert len(seen) == 2
    assert seen[1][2:] == facts(other)[2:]
    assert [issubclass(kind, nnx.Variable) for kind in seen[1][:2]] == [
        isinstance(x, nnx.Variable) for x in (other.factor, other.shift)
    ]


def test_the_same_function_takes_new_objects_in_any_place():
    @nnx.jit(**TREE)
    def f(a, b=1.0):
        a, b = [x.factor[0] if isinstance(x, Scale) else x for x in (a, b)]
        return a * b

    for _ in range(3):
        assert f(Scale(), 5.0) == 10.0
        assert f(5.0, Scale()) == 10.0
        assert f(Scale(), b=7.0) == 14.0
        assert f(a=Scale()) == 2.0
        assert f(Scale(), Scale(3.0)) == 6.0


def test_shared_variables_are_refused_though_there_is_a_plan():
    step = nnx.jit(lambda pair: pair[0].factor[...], **TREE)
    for _ in range(2):
        step((Scale(), Scale()))
    shared = Scale()
    with pytest.raises(ValueError, match="factor"):
        step((shared, shared))
    pair = Scale(), Scale()
    pair[1].factor = pair[0].factor
    with pytest.raises(ValueError, match="factor"):
        step(pair)


def test_cycles_are_refused_though_there_is_a_plan():
    step = nnx.jit(lambda model: model.factor[...], **TREE)
    for _ in range(2):
        step(Scale())
    model = Scale()
    model.itself = model
    with pytest.raises(ValueError, match="Cycle"):
        step(model)


def test_long_cycles_and_deep_trees_are_told_apart():
    def chain(length):
        first = last = nnx.Module()
        for _ in range(length):
            last.next = nnx.Module()
            last = last.next
        return first, last

    first, last = chain(250)
    last.next = nnx.Param(jnp.ones(1))
    assert len(tree_checks.flatten(first)[0]) == 1
    last.next = first
    with pytest.raises(ValueError, match="Cycle"):
        tree_checks.flatten(first)


def test_read_only_variables_and_refs_are_as_without_a_plan():
    step = nnx.jit(double, **TREE)
    for _ in range(2):
        step(Scale(), 1)
    with pytest.raises(nnx.errors.ImmutableVariableError):
        step(nnx.with_vars(Scale(), mutable=False), 1)
    for _ in range(2):
        model = Scale()
        model.factor = nnx.Param(model.factor[...], ref=True)
        step(model, 1)
        np.testing.assert_array_equal(model.factor[...], [4.0, 4.0])


def test_a_call_that_fails_changes_nothing():
    @nnx.jit(**TREE)
    def step(model, x):
        model.factor[...] *= 2
        if x.ndim:
            raise RuntimeError("no")

    for _ in range(2):
        step(Scale(), jnp.ones(()))
    model = Scale()
    with pytest.raises(RuntimeError, match="no"):
        step(model, jnp.ones(1))
    np.testing.assert_array_equal(model.factor[...], [2.0, 2.0])


def test_models_are_freed_and_plans_are_bounded():
    step = nnx.jit(lambda model: model.factor[...] + 1, **TREE)
    for number in range(tree_plans.LIMIT + 3):
        for _ in range(2):
            model = Scale(tag=str(number))
            np.testing.assert_array_equal(step(model), [3.0, 3.0])
    gone = weakref.ref(model), weakref.ref(model.factor)
    del model
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
    assert len(step._plans._trees.known) <= tree_plans.LIMIT


def test_eager_transforms_take_new_objects_apart_once(packs):
    def loss(model, x):
        return jnp.sum(model.factor[...] * x)

    grad = nnx.grad(loss, **TREE)
    for factor in (1.0, 2.0, 3.0, 4.0):
        found = grad(Scale(factor), jnp.full(2, factor))
        np.testing.assert_array_equal(jax.tree.leaves(found)[0], np.full(2, factor))
    assert len(packs) == 2
