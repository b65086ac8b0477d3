"""A List of equal layers becomes a Stack and back; sub-modules replaced in place."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import catalog, tables, zoo
from tests.comparisons import unchanged


class Block(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(self.linear(x))


class Net(nnx.Module):
    def __init__(self, rngs, length=3):
        self.blocks = nnx.List([Block(rngs) for _ in range(length)])
        self.head = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x):
        if isinstance(self.blocks, nnx.Stack):
            return self.head(self.blocks(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


X = np.random.default_rng(0).normal(size=(2, 4)).astype("float32")


def test_numbers_stay_and_the_way_back_gives_the_same_model():
    model, expected = Net(nnx.Rngs(0)), Net(nnx.Rngs(0))
    assert nnx.surgery.stack(model, "blocks") == [("blocks",)]
    assert model.blocks.layers.linear.kernel.shape == (3, 4, 4)
    np.testing.assert_allclose(model(X), expected(X), rtol=1e-5)
    assert nnx.surgery.unstack(model) == [("blocks",)]
    assert nnx.graphdef(model) == nnx.graphdef(expected)
    found, values = held_by(model)[1], held_by(expected)[1]
    assert jax.tree.map(bits, found) == jax.tree.map(bits, values)
    model.blocks[0].linear.bias[...] = 1.0  # not read-only


def test_a_stack_in_a_stack_is_unstacked_after_the_outer_one():
    def outer(rngs):
        inner = nnx.List([nnx.Linear(2, 2, rngs=rngs) for _ in range(2)])
        return nnx.Sequential(nnx.Dict(blocks=inner))

    model = nnx.Dict(outer=nnx.List([outer(nnx.Rngs(seed)) for seed in range(3)]))
    before = held_by(model)
    nnx.surgery.stack(model, "outer.*.**.blocks")
    nnx.surgery.stack(model, "outer")
    with pytest.raises(
        ValueError, match=r"blocks is inside the Stack outer,.*3 layers"
    ):
        nnx.surgery.unstack(model)
    assert nnx.surgery.unstack(model, "outer") == [("outer",)]
    nnx.surgery.stack(model, "outer")
    nnx.surgery.unstack(model, "outer")
    nnx.surgery.unstack(model)
    assert held_by(model)[0] == before[0]
    nnx.surgery.stack(model, "outer")
    with pytest.raises(ValueError, match="stack the inner ones before the outer one"):
        nnx.surgery.stack(model, "outer.**.blocks")


def test_the_first_axis_of_an_ensemble_is_not_that_of_the_layers():
    def make(key):
        return nnx.Dict(blocks=nnx.Stack(layer, 4, rngs=nnx.Rngs(key)))

    def layer(rngs):
        return nnx.Linear(2, 2, rngs=rngs)

    model = nnx.vmap(make)(jax.random.split(jax.random.key(0), 3))
    with pytest.raises(
        ValueError, match=r"Stack of 4 layers has .* that of 3.\n.*vmap"
    ):
        nnx.surgery.unstack(model)


def test_checkpoints_of_one_form_load_into_the_other(tmp_path):
    listed, stacked = Net(nnx.Rngs(0)), Net(nnx.Rngs(1))
    nnx.surgery.stack(stacked, "blocks")
    nnx.checkpoints.save(tmp_path / "list", listed)
    nnx.checkpoints.save(tmp_path / "stack", stacked)
    abstract = nnx.eval_shape(lambda: Net(nnx.Rngs(2)))
    from_list = nnx.checkpoints.restore(tmp_path / "list", abstract)
    nnx.surgery.stack(from_list, "blocks")
    nnx.surgery.stack(abstract, "blocks")
    from_stack = nnx.checkpoints.restore(tmp_path / "stack", abstract)
    nnx.surgery.unstack(from_stack)
    for found, model in ((from_list, listed), (from_stack, stacked)):
        np.testing.assert_allclose(found(X), model(X), rtol=1e-5)


def test_what_is_no_list_of_equal_layers_is_refused_and_stays():
    model = Net(nnx.Rngs(0))
    model.blocks[1].dropout.rate = 0.25
    with pytest.raises(ValueError, match=r"1 are not alike.\n  dropout/rate: 0.5"):
        nnx.surgery.stack(model, "blocks")
    model = Net(nnx.Rngs(0))
    model.blocks[1].linear.kernel = model.blocks[0].linear.kernel
    with pytest.raises(ValueError, match=r"shared.*\n.*linear.kernel"):
        nnx.surgery.stack(model, "blocks")
    model = Net(nnx.Rngs(0))
    model.first = model.blocks[0]
    with pytest.raises(ValueError, match=r"shared.*\n  \[0\]"):
        nnx.surgery.stack(model, "blocks")
    with pytest.raises(ValueError, match="a Linear is selected"):
        nnx.surgery.stack(model, "head")
    with pytest.raises(ValueError, match="a Linear is selected"):
        nnx.surgery.unstack(model, "head")
    assert isinstance(model.blocks, nnx.List)


class Rich(nnx.Module):
    """Has all that may differ."""

    def __init__(self, seed):
        self.linear = nnx.Linear(2, 2, rngs=nnx.Rngs(seed))
        self.norm = nnx.LayerNorm(2, rngs=nnx.Rngs(seed))
        self.count = nnx.Variable(jnp.int32(2**24 + seed))
        self.table = nnx.Cache({"a": jnp.ones(2), "b": None})
        self.key = nnx.Variable(jax.random.key(seed))
        self.factor = nnx.Variable(2.0)
        self.mask = nnx.data(jnp.ones(2, bool))

    def __call__(self, x):
        return self.norm(self.linear(x)) * self.factor[...]


class Twice(nnx.LayerNorm):
    def __call__(self, x):
        return 2 * super().__call__(x)


def changed(path, change):
    """A function that changes the value of a Variable."""

    def run(layer):
        variable = dict(nnx.iter_graph(layer))[path]
        variable.set_value(change(variable.get_value()))

    return run


CHANGES = [
    (lambda x: setattr(x, "norm", Twice(2, rngs=nnx.Rngs(0))), "norm: a LayerNorm"),
    (lambda x: setattr(x.norm, "epsilon", 100.0), "norm/epsilon: 1e-06 in"),
    (lambda x: setattr(x, "extra", 3), "extra: nothing in"),
    (lambda x: x.linear.kernel.set_metadata(tag="w"), "metadata 'tag': nothing in"),
    (lambda x: nnx.surgery.freeze(x, nnx.Param, where="linear"), "bias: a Param .*Fro"),
    (lambda x: setattr(x.linear, "bias", nnx.data(x.linear.bias[...])), "bias: a Para"),
    (lambda x: setattr(x.linear, "bias", None), "linear/bias: a Param"),
    (lambda x: setattr(x, "mask", jnp.ones(2)), r"mask: bool\[2\] in .*, float32\[2\]"),
    (changed(("linear", "kernel"), lambda x: x.astype("bfloat16")), r"bfloat16\[2,2\]"),
    (changed(("linear", "bias"), lambda x: x[:1]), r"float32\[2\] in .*float32\[1\]"),
    (changed(("count",), jnp.float32), r"count: .*int32\[\] in .*float32\[\]"),
    (changed(("count",), lambda x: 5), r"count: .*int32\[\] in .*int32\[\], weak"),
    (changed(("count",), lambda x: "five"), "count: .*a str"),
    (changed(("factor",), lambda x: jnp.float32(2.0)), "factor: .*, weak in"),
    (changed(("factor",), lambda x: np.float64(2.0)), r"factor: .*float64\[\] in"),
    (changed(("key",), lambda x: jax.random.key(0, impl="rbg")), "key<fry>.*key<rbg>"),
    (changed(("table",), lambda x: {"a": x["a"]}), "table: a Cache {'a': float32"),
    (changed(("table",), lambda x: {**x, "b": x["a"]}), "'b': None} in"),
]


def held_by(model):
    """The structure of a model, and the values in its Variables."""
    found = [x for _, x in nnx.iter_graph(model) if isinstance(x, nnx.Variable)]
    return nnx.graphdef(model), [x.get_raw_value() for x in found]


def assert_untouched(before, model):
    (graphdef, values), (now, found) = before, held_by(model)
    assert now == graphdef and all(map(lambda x, y: x is y, found, values))


class Other(Rich):
    def __call__(self, x):
        return 2 * super().__call__(x)


def test_layers_in_refs_come_back_in_refs():
    model = nnx.Dict(blocks=nnx.List([nnx.to_refs(Rich(i), nnx.Param) for i in (0, 1)]))
    before = held_by(model)
    expected = [bits(jnp.array(x[...])) for x in before[1] if isinstance(x, jax.Ref)]
    nnx.surgery.stack(model, "blocks")
    assert model.blocks.layers.linear.kernel.has_ref
    assert model.blocks(jnp.ones((1, 2))).shape == (1, 2)
    nnx.surgery.unstack(model)
    assert held_by(model)[0] == before[0]
    found = [x for x in held_by(model)[1] if isinstance(x, jax.Ref)]
    assert [bits(jnp.array(x[...])) for x in found] == expected


def rich_with(change):
    layer = Rich(1)
    change(layer)
    return layer


DIFFERENT = [
    (lambda: Other(1), "<root>: a Rich in .*, a Other in"),
    (lambda: nnx.LayerNorm(2, rngs=nnx.Rngs(0)), "<root>: a Rich in .*, a LayerNorm"),
    (lambda: nnx.to_refs(Rich(1), nnx.Param), r"float32\[2\], in a ref in"),
    (lambda: nnx.eval_shape(lambda: Rich(1)), r"float32\[2\], abstract in"),
    (lambda: 3, r"<root>: a Rich in .*, int32\[\], weak in"),
    (lambda: jnp.ones(2), r"<root>: a Rich in .*, float32\[2\] in"),
    *((lambda change=change: rich_with(change), where) for change, where in CHANGES),
]


@pytest.mark.parametrize(("make", "where"), DIFFERENT, ids=[x for _, x in DIFFERENT])
def test_what_differs_in_more_than_values_is_refused(make, where):
    model = nnx.Dict(blocks=nnx.List([Rich(0), make()]))
    before = held_by(model)
    with pytest.raises(nnx.errors.StateMismatchError, match=where):
        nnx.surgery.stack(model, "blocks")
    assert_untouched(before, model)


def test_the_error_lists_what_differs():
    stack = nnx.Stack(lambda rngs: Rich(0), 2, rngs=nnx.Rngs(0))
    layer = Rich(1)
    layer.norm.scale[...] = layer.norm.scale[...] * 3
    layer.linear.kernel.set_value(jnp.ones((3, 2)))
    layer.extra, layer.linear.bias = nnx.Param(jnp.ones(1)), None
    before = held_by(stack)
    with pytest.raises(nnx.errors.StateMismatchError) as caught:
        stack[1] = layer
    error = caught.value
    (misfit,) = error.misfits
    assert misfit[:2] == (("linear", "kernel"), "shape")
    assert error.unexpected == (("extra",),)
    assert_untouched(before, stack)


@tables.cases(
    "make, what",
    (lambda: jnp.ones((3, 2)), "shape"),
    (lambda: jnp.ones((2, 2), "bfloat16"), "dtype"),
    (lambda: {"a": jnp.ones((2, 2))}, "value"),
    ids=["shape", "dtype", "value"],
)
def test_the_error_says_how_a_leaf_differs(make, what):
    layers = [nnx.Linear(2, 2, rngs=nnx.Rngs(i)) for i in (0, 1)]
    model = nnx.Dict(blocks=nnx.List(layers))
    model.blocks[1].kernel.set_value(make())
    with pytest.raises(nnx.errors.StateMismatchError) as caught:
        nnx.surgery.stack(model, "blocks")
    assert [misfit[:2] for misfit in caught.value.misfits] == [(("kernel",), what)]


VALUES = {
    "float32": lambda random: jnp.asarray(random.normal(size=2), "float32"),
    "nan": lambda random: jnp.array([np.nan, -0.0, np.inf, 1e-40], "float32"),
    "bfloat16": lambda random: jnp.asarray(random.normal(size=2), "bfloat16"),
    "complex": lambda random: jnp.array([random.normal() + 2j]),
    "int32": lambda random: jnp.array(2**30 + random.integers(100), "int32"),
    "bool": lambda random: jnp.array(random.random(3) < 0.5),
    "weak": lambda random: jnp.asarray(random.normal()),
    "fry": lambda random: jax.random.key(random.integers(9)),
    "rbg": lambda random: jax.random.key(random.integers(9), impl="rbg"),
    "empty": lambda random: jnp.zeros((0, 2)),
    "dict": lambda random: {"a": jnp.array(random.normal()), "b": (jnp.ones(1), None)},
    "numpy": lambda random: random.normal(size=2).astype("float32"),
    "number": lambda random: float(np.float32(random.normal())),
    "whole": lambda random: int(random.integers(100)),
    "flag": lambda random: bool(random.random() < 0.5),
    "large": lambda random: 2**40 + int(random.integers(100)),
    "numpy64": lambda random: random.normal(size=2),
    "str": lambda random: "text",
}
NO_ARRAYS = ("large", "numpy64", "str")
# What JAX computes with in the same way.
SAME = {"numpy": "float32", "number": "weak"}


def bits(x):
    x = x if isinstance(x, jax.Array) else jnp.asarray(x)
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    data = np.asarray(jax.random.key_data(x) if is_key else x)
    return str(x.dtype), is_key or x.weak_type, data.shape, data.tobytes()


@pytest.mark.parametrize("seed", range(40))
def test_the_way_back_gives_the_same_bits_or_nothing_has_changed(seed):
    random = np.random.default_rng(seed)
    kinds = [[*random.choice([*VALUES][: random.choice([15, 18])], size=2)]] * 3
    if random.random() < 0.5:
        kinds[random.integers(3)] = [kinds[0][0], random.choice([*VALUES])]
    layers = [
        nnx.Dict(
            a=nnx.Variable(VALUES[a](random)),
            b=nnx.List([nnx.Param(VALUES[b](random))]),
        )
        for a, b in kinds
    ]
    forms = [[SAME.get(kind, kind) for kind in own] for own in kinds]
    is_possible = forms[0] == forms[1] == forms[2] and not {*kinds[0]} & {*NO_ARRAYS}
    model = nnx.Dict(blocks=nnx.List(layers))
    before = held_by(model)
    if not is_possible:
        with pytest.raises(nnx.errors.StateMismatchError):
            nnx.surgery.stack(model, "blocks")
        return assert_untouched(before, model)
    nnx.surgery.stack(model, "blocks")
    nnx.surgery.unstack(model)
    assert held_by(model)[0] == before[0]
    assert jax.tree.map(bits, held_by(model)[1]) == jax.tree.map(bits, before[1])


@catalog.every_family
def test_layers_of_one_make_are_alike(row):
    stack = nnx.Stack(lambda rngs: row.make(), 2, rngs=nnx.Rngs(0))
    layers = [row.make(), row.make(seed=1)]
    stack[1] = layers[1]
    model = nnx.Dict(blocks=nnx.List(layers))
    before = held_by(model)
    nnx.surgery.stack(model, "blocks")
    assert nnx.graphdef(model.blocks.layers) == nnx.graphdef(stack.layers)
    found, expected = [
        [bits(x)[:3] for x in jax.tree.leaves(held_by(each.layers)[1])]
        for each in (model.blocks, stack)
    ]
    assert found == expected
    nnx.surgery.unstack(model, "blocks")
    assert held_by(model)[0] == before[0]
    assert jax.tree.map(bits, held_by(model)[1]) == jax.tree.map(bits, before[1])


# ----------------------------------------------------------------- sub-modules replaced


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


REFUSED = {
    "nothing": ("frist", Wrapper, "matches no module.*\n.*similar paths: first"),
    "class": (nnx.Conv, Wrapper, "Conv matches no module.*\n  available: by_name"),
    "one of a list": (["first", nnx.Conv], Wrapper, "where=Conv matches no module"),
    "the model": (zoo.Box, Wrapper, "the model itself, a Box, is selected"),
    "nested": ("layers.**", Wrapper, r"layers\[0\] is inside layers, and both"),
    "several": ("layers[*]", linear(), r"2 modules match.\n  layers\[0\], layers\[2\]"),
    "none": ("first", lambda old: None, "returned NoneType for first"),
    "container": ("first", lambda old: [old], "returned list for first"),
    "malformed": ("first..a", Wrapper, "'first..a' is malformed"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_done_is_refused_and_nothing_is_changed(name):
    where, by, message = REFUSED[name]
    model = make_model()
    with unchanged(model), pytest.raises(ValueError, match=message):
        replace(model, where, by)


def test_nothing_is_changed_if_the_function_fails():
    model = make_model()
    calls = iter(range(9))

    def by(old):
        if next(calls) == 3:
            raise RuntimeError("by failed")
        return Wrapper(old)

    with unchanged(model), pytest.raises(RuntimeError, match="by failed"):
        replace(model, nnx.Linear, by)


def test_objects_of_another_trace_are_left_alone():
    model, error = make_model(), nnx.errors.TraceContextError
    with unchanged(model), pytest.raises(error, match="'Dict'|'List'|'Box'"):
        jax.jit(lambda: replace(model, nnx.Linear, Wrapper) and None)()


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
    with pytest.raises(ValueError, match="contains a module to replace and, "):
        replace(model, "a[0]", Wrapper)


def test_the_new_structure_reaches_the_caller_of_a_compiled_function():
    model = make_model()

    @nnx.jit(graph=True, graph_updates=True)
    def wrap(model):
        replace(model, "first", Wrapper)

    wrap(model)
    assert type(model.first) is Wrapper and type(model.first.inner) is nnx.Linear
