"""Transforms traced at each call: the same objects again give no stale result."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import graftree as nnx
from graftree import _jax, errors
from graftree.core.graph import flattening
from graftree.transforms.crossing import packing
from tests import strategies
from tests.modes import GRAPH, GRAPH_UPDATES, TREE
from tests.transforms.crossing.plans.test_plans import (
    MUTATIONS,
    Model,
    check_in_threads,
    visit,
)


def mapped(mode, f=visit):
    each = nnx.vmap(lambda m, x: f(m) + x, in_axes=(None, 0), **mode)
    return lambda model: each(model, jnp.arange(2.0))


def differentiated(mode, f=visit):
    return nnx.value_and_grad(f, allow_int=True, **mode)


def scanned(mode, f=visit):
    axes = (nnx.Carry, 0)
    each = nnx.scan(lambda m, x: (m, f(m) + x), in_axes=axes, out_axes=axes, **mode)
    return lambda model: each(model, jnp.arange(1.0))[1]


TRANSFORMS = pytest.mark.parametrize("make", [mapped, differentiated])
WITH_SCAN = pytest.mark.parametrize("make", [mapped, differentiated, scanned])
ALL_MODES = (GRAPH_UPDATES, GRAPH, TREE)
KEPT = {
    (make, *mode.items()): make(mode)
    for make in (mapped, differentiated, scanned)
    for mode in ALL_MODES
}


def leaves(tree):
    """The arrays in an output, less the derivatives of integers."""
    found = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
    return [x for x in found if x.dtype != jax.dtypes.float0]


@WITH_SCAN
@strategies.examples(6, 25)
@given(data=st.data())
def test_repeated_calls_equal_first_ones(make, mode, data):
    kept = KEPT[make, *mode.items()]
    ours, theirs = Model(), Model()
    steps = st.tuples(st.sampled_from(MUTATIONS), st.integers(0, 1))
    for mutate, k in data.draw(st.lists(steps, min_size=1, max_size=4)):
        for _ in range(data.draw(st.integers(1, 4))):
            pairs = zip(leaves(kept(ours)), leaves(make(mode)(theirs)), strict=True)
            for one, other in pairs:
                np.testing.assert_array_equal(one, other)
        mutate(ours, k)
        mutate(theirs, k)
    ours_def, ours_state = nnx.split(ours, graph=True)
    theirs_def, theirs_state = nnx.split(theirs, graph=True)
    assert ours_def == theirs_def
    jax.tree.map(np.testing.assert_array_equal, ours_state, theirs_state)


@pytest.fixture
def counts(monkeypatch):
    """Counts what is taken apart, with those who do it."""
    found = {"pack": 0, "flatten": 0}

    def count(module, name, key):
        function = getattr(module, name)

        def counting(*args):
            found[key] += 1
            return function(*args)

        monkeypatch.setattr(module, name, counting)

    count(packing, "pack", "pack")
    count(flattening, "flatten_graph", "flatten")
    return found


class Plain(nnx.Module):
    """Only attributes can change in it."""

    def __init__(self):
        self.kernel = nnx.Param(jnp.ones(2))
        self.same = self.kernel
        self.array = jnp.arange(3.0)
        self.size = 3
        self.layers = nnx.List([nnx.Linear(2, 2, rngs=nnx.Rngs(0))])
        self.heads = nnx.Dict(a=nnx.Param(jnp.ones(1)))


def double(model):
    model.kernel[...] *= 2
    return jnp.sum(model.kernel[...]) + jnp.sum(model.array)


@WITH_SCAN
def test_objects_are_taken_apart_no_more_once_they_are_known(make, counts):
    model, call = Plain(), make(GRAPH_UPDATES, double)
    del model.same  # what is shared is looked for in two axes
    for _ in range(3):
        call(model)
    counts.update(pack=0, flatten=0)
    for _ in range(3):
        nnx.Linear(1, 1, rngs=nnx.Rngs(0))  # others may change meanwhile
        model.array = jnp.ones(3)
        call(model)
    assert counts["pack"] == 0
    assert counts["flatten"] == 0 or make is scanned  # it is traced each time
    np.testing.assert_array_equal(model.kernel[...], 64 * np.ones(2))
    model.kernel = nnx.Param(jnp.ones(2))
    call(model)
    np.testing.assert_array_equal(model.kernel[...], 2 * np.ones(2))


INSIDE = (
    lambda m: setattr(m, "kernel", nnx.Param(jnp.zeros(2))),
    lambda m: setattr(m, "array", jnp.zeros(3)),
    lambda m: setattr(m, "size", 4),
    lambda m: setattr(m, "size", 3.0),
    lambda m: setattr(m, "new", nnx.Param(jnp.zeros(2))),
    lambda m: delattr(m, "same"),
    lambda m: setattr(m, "same", m.heads["a"]),
    lambda m: vars(m).__setitem__("size", 5),
    lambda m: vars(m).__setitem__("new", 5),
    lambda m: object.__setattr__(m, "size", 5),
    lambda m: m.layers.append(nnx.Linear(2, 2, rngs=nnx.Rngs(1))),
    lambda m: m.layers.reverse(),
    lambda m: m.layers.pop(),
    lambda m: m.heads.__setitem__("b", nnx.Param(jnp.zeros(2))),
    lambda m: m.heads.pop("a"),
    lambda m: setattr(m.layers[0], "bias", None),
    lambda m: setattr(m, "size", nnx.data(jnp.zeros(2))),
    lambda m: m.kernel.set_metadata(tag="t"),
    lambda m: setattr(m, "again", nnx.data(m)),
    lambda m: None,
)


@TRANSFORMS
@pytest.mark.parametrize("change", INSIDE)
def test_each_change_of_structure_inside_reaches_the_caller(make, change):
    ours, theirs = Plain(), Plain()

    def changing(model):
        change(model)
        return jnp.array(0.0)

    make(GRAPH_UPDATES, changing)(ours)
    change(theirs)
    assert nnx.graphdef(ours) == nnx.graphdef(theirs)


@TRANSFORMS
def test_a_change_of_structure_that_is_dropped_is_still_told(make):
    call = make(GRAPH, lambda model: setattr(model, "size", 4) or jnp.array(0.0))
    model = Plain()
    for _ in range(5):
        with pytest.warns(errors.LostUpdateWarning, match="drops a change of a Plain"):
            call(model)
    assert model.size == 3


@TRANSFORMS
def test_an_exception_leaves_no_tracer_and_no_update(make, mode):
    fails = []

    def step(model):
        model.kernel[...] *= 2
        if fails:
            raise ZeroDivisionError
        return jnp.sum(model.kernel[...])

    model, call = Model(), make(mode, step)
    for _ in range(4):
        call(model)
    fails.append(1)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            call(model)
    values = jax.tree.leaves(nnx.state(model))
    assert not any(isinstance(x, _jax.Tracer) for x in values)
    fails.clear()
    call(model)
    np.testing.assert_array_equal(model.kernel[...], 32 * np.ones(2))


@TRANSFORMS
def test_an_alias_that_comes_later_is_refused(make):
    model, call = Model(), make(TREE)
    for _ in range(4):
        call(model)
    model.heads["again"] = model.kernel
    with pytest.raises(ValueError, match="Duplicate"):
        call(model)


def test_an_alias_over_two_axes_that_comes_later_is_refused():
    @nnx.vmap(in_axes=(0, None))
    def add(a, b):
        return a.kernel[...] + b.kernel[...]

    a, b = nnx.Module(), nnx.Module()
    a.kernel, b.kernel = nnx.Param(jnp.ones(2)), nnx.Param(jnp.ones(2))
    for _ in range(4):
        assert add(a, b).shape == (2, 2)
    b.kernel = a.kernel
    with pytest.raises(ValueError, match="Inconsistent aliasing"):
        add(a, b)


@TRANSFORMS
def test_what_a_function_captures_is_read_at_each_call(make, mode):
    other, scale = Model(), [1.0]
    call = make(mode, lambda m: jnp.sum(m.kernel[...] * other.kernel[...]) * scale[0])
    model, totals = Model(), []
    for number in range(5):
        other.kernel[...] = jnp.full(2, number)
        scale[0] = number
        out = call(model)
        totals.append(float(jnp.ravel(out[0])[0]))
    assert totals == [2.0 * number**2 for number in range(5)]


def test_filters_that_look_at_values_are_asked_at_each_call():
    big = nnx.DiffState(0, lambda _, x: float(x[...].sum()) > 1)
    loss = nnx.grad(lambda m: sum(jnp.sum(x[...]) for x in (m.a, m.b)), argnums=big)
    model = nnx.Module()
    model.a, model.b = nnx.Param(jnp.zeros(1)), nnx.Param(jnp.ones(1) * 2)
    for _ in range(4):
        assert [*loss(model)] == ["b"]
    model.a[...] = jnp.ones(1) * 2
    assert [*loss(model)] == ["a", "b"]


@pytest.mark.parametrize(
    "filter_",
    [
        nnx.Param,
        nnx.Not(nnx.Cache),
        (nnx.All(nnx.Param, nnx.PathContains("kernel")), nnx.Param),
        nnx.Any(nnx.Param, nnx.filterlib.PathIn(("other",))),
    ],
)
def test_filters_of_classes_and_paths_follow_replaced_variables(filter_):
    grad = nnx.grad(
        lambda m: jnp.sum(m.kernel[...] ** 2), argnums=nnx.DiffState(0, filter_)
    )
    model = Plain()
    for _ in range(4):
        assert "kernel" in grad(model)
    model.kernel = model.same = nnx.Cache(jnp.ones(2))
    assert "kernel" not in grad(model)


def test_refs_are_written_where_they_are(mode):
    count = nnx.Module()
    count.steps = nnx.Variable(jnp.zeros(2), ref=True)

    def step(count):
        count.steps[...] += 1
        return jnp.zeros(2)

    call = nnx.vmap(step, in_axes=0, **mode)
    for _ in range(5):
        call(count)
    np.testing.assert_array_equal(count.steps[...], [5, 5])
    call = nnx.grad(lambda c: jnp.sum(c.steps[...]), argnums=0, **mode)
    for _ in range(3):
        if mode == GRAPH_UPDATES:
            assert not call(count)
        else:
            with pytest.raises(TypeError, match="Ref-typed"):
                call(count)


@WITH_SCAN
def test_threads_may_share_a_function(make, mode):
    check_in_threads(make(mode, double), 5)
