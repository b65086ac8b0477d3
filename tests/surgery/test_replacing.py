"""Sub-modules replaced in place: everywhere, all or none, with the right errors."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import tables, zoo

replace = nnx.surgery.replace
Pair = collections.namedtuple("Pair", "a b")


def linear(seed=0, size=2):
    return nnx.Linear(2, size, rngs=nnx.Rngs(seed))


class Wrapper(nnx.Module):
    def __init__(self, inner):
        self.inner = inner

    def __call__(self, x):
        return 2 * self.inner(x)


def make_model():
    """A model with linear layers in all kinds of containers."""
    pair = Pair(linear(4), (linear(5),))
    return zoo.Box(
        first=linear(0),
        layers=nnx.List([linear(1), nnx.relu, linear(2)]),
        by_name=nnx.data({"a": [linear(3)], "b": pair}),
    )


def linears_of(model):
    a, (b, (c,)) = model.by_name["a"][0], model.by_name["b"]
    return [a, b, c, model.first, model.layers[0], model.layers[2]]


PATHS = [
    ("by_name", "a", 0),
    ("by_name", "b", "a"),
    ("by_name", "b", "b", 0),
    ("first",),
    ("layers", 0),
    ("layers", 2),
]


def test_modules_of_a_class_are_replaced_in_all_kinds_of_containers():
    model = make_model()
    old = linears_of(model)
    assert replace(model, nnx.Linear, Wrapper) == PATHS
    assert [type(x) for x in linears_of(model)] == [Wrapper] * 6
    assert all(new.inner is x for new, x in zip(linears_of(model), old, strict=True))
    assert type(model.by_name["b"]) is Pair and model.layers[1] is nnx.relu


@tables.cases(
    "where, expected",
    ("first", [3]),
    ("layers[2]", [5]),
    ("layers.*", [4, 5]),
    ("by_name.**", [0, 1, 2]),
    ("by_name.b.{a,b[0]}", [1, 2]),
    (["first", "layers[:1]"], [3, 4]),
    (lambda path, x: path[-1:] == (0,), [0, 2, 4]),
    (nnx.All(nnx.Linear, nnx.surgery.at("layers.**")), [4, 5]),
)
def test_modules_are_selected_by_path_class_or_predicate(where, expected):
    model = make_model()
    assert replace(model, where, Wrapper) == [PATHS[n] for n in expected]
    kinds = [type(x) is Wrapper for x in linears_of(model)]
    assert [n for n, is_replaced in enumerate(kinds) if is_replaced] == expected


def test_compiled_functions_see_the_new_module(mode):
    model = nnx.Sequential(linear(), linear(1, size=3))
    if mode["graph"]:
        model.tied = model.layers[1]
    call = nnx.jit(lambda model, x: model(x), **mode)
    x = jnp.ones((1, 2))
    before = np.asarray([call(model, x) for _ in range(3)])[-1]
    replace(model, "layers[1]", Wrapper)
    np.testing.assert_allclose(call(model, x), 2 * before, rtol=1e-6)
    if mode["graph"]:
        assert model.tied is model.layers[1]


def test_shared_modules_are_replaced_once_and_stay_shared():
    model = make_model()
    model.second = model.first
    model.by_name["c"] = (model.first, 7)
    made = []

    def by(old):
        made.append(Wrapper(old))
        return made[-1]

    assert replace(model, "second", by) == [("by_name", "c", 0)]
    assert len(made) == 1
    assert model.first is model.second is model.by_name["c"][0] is made[0]


def test_references_of_the_module_itself_stay_as_they_are():
    model = nnx.Dict(a=nnx.Dict(weight=nnx.Param(jnp.ones(1))), b=nnx.Dict())
    model.a.itself, model.a.parent, model.b.sibling = model.a, model, model.a
    old = model.a
    replace(model, "a", Wrapper)
    assert type(model.a) is Wrapper and model.b.sibling is model.a
    assert model.a.inner is old and old.itself is old and old.parent is model


def test_siblings_that_know_their_parent_are_replaced_together():
    model = nnx.Dict(a=nnx.Dict(), b=nnx.Dict())
    model.a.parent = model.b.parent = model
    assert replace(model, "{a,b}", Wrapper) == [("a",), ("b",)]
    assert type(model.a) is type(model.b) is Wrapper


def test_a_function_in_the_place_of_a_module_is_static():
    model = nnx.Sequential(linear(), nnx.Dropout(0.5), linear())
    replace(model, nnx.Dropout, lambda old: nnx.relu)
    assert model.layers[1] is nnx.relu
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(model))
    x = jnp.ones((1, 2))
    np.testing.assert_allclose(jax.jit(lambda m: m(x))(model), model(x), rtol=1e-6)


def test_a_module_that_stays_is_not_listed():
    model = make_model()
    kept = model.first
    by = {id(kept): kept}
    found = replace(model, "{first,layers[0]}", lambda old: by.get(id(old), linear()))
    assert found == [("layers", 0)] and model.first is kept


def unchanged(model, before):
    return all(x is y for x, y in zip(linears_of(model), before, strict=True))


REFUSED = {
    "nothing": ("frist", Wrapper, "'frist' matches no module.*\n.*near it: first"),
    "class": (nnx.Conv, Wrapper, "Conv matches no module.*\n  there are: by_name"),
    "one of a list": (["first", nnx.Conv], Wrapper, "where=Conv matches no module"),
    "the model": (zoo.Box, Wrapper, "the model itself, a Box, is selected"),
    "nested": ("layers.**", Wrapper, r"layers\[0\] is inside of layers, and both"),
    "several": ("layers[*]", linear(), r"2 modules match.\n  layers\[0\], layers\[2\]"),
    "none": ("first", lambda old: None, "returned NoneType for first"),
    "container": ("first", lambda old: [old], "returned list for first"),
    "malformed": ("first..a", Wrapper, "'first..a' is malformed"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_done_is_refused_and_nothing_is_changed(name):
    where, by, message = REFUSED[name]
    model = make_model()
    before = linears_of(model)
    with pytest.raises(ValueError, match=message):
        replace(model, where, by)
    assert unchanged(model, before)


def test_nothing_is_changed_if_the_function_fails():
    model = make_model()
    before, calls = linears_of(model), iter(range(9))

    def by(old):
        if next(calls) == 3:
            raise RuntimeError("by failed")
        return Wrapper(old)

    with pytest.raises(RuntimeError, match="by failed"):
        replace(model, nnx.Linear, by)
    assert unchanged(model, before)


def test_objects_of_another_trace_are_left_alone():
    model = make_model()
    before = linears_of(model)
    with pytest.raises(nnx.errors.TraceContextError, match="'Dict'|'List'|'Box'"):
        jax.jit(lambda: replace(model, nnx.Linear, Wrapper) and None)()
    assert unchanged(model, before)


def test_wrong_types_are_refused():
    with pytest.raises(TypeError, match="expects a Module"):
        replace(nnx.relu, nnx.Linear, Wrapper)
    with pytest.raises(TypeError, match="as `by`, got int"):
        replace(make_model(), nnx.Linear, 3)
    with pytest.raises(TypeError, match="selects no parts of a model"):
        replace(make_model(), None, Wrapper)


def test_a_tuple_that_contains_itself_by_another_object_is_refused():
    model = nnx.Dict(a=nnx.data((nnx.Dict(), nnx.Dict())))
    model.a[1].back = nnx.data(model.a)
    with pytest.raises(ValueError, match="contains a module to replace, and itself"):
        replace(model, "a[0]", Wrapper)


def test_the_new_structure_reaches_the_caller_of_a_compiled_function():
    model = make_model()

    @nnx.jit(graph=True, graph_updates=True)
    def wrap(model):
        replace(model, "first", Wrapper)

    wrap(model)
    assert type(model.first) is Wrapper and type(model.first.inner) is nnx.Linear
