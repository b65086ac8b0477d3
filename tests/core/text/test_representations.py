"""What objects say about themselves, and what ``dir`` lists."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import tables, zoo


def module(base, **attributes):
    """A module of this library or of the peer."""
    model = type(base)("Model", (base,), {})()
    for name, value in attributes.items():
        setattr(model, name, value)
    return model


def first_line(x):
    """What the first line of a text says of sizes."""
    return repr(x).splitlines()[0].partition("( # ")[2]


def int8(count):
    return jax.ShapeDtypeStruct((count,), jnp.int8)


@tables.cases(
    "value, expected",
    (int8(24), "24 (24 B)"),
    (int8(1000), "1,000 (1,000 B)"),
    (int8(1004), "1,004 (1.0 KB)"),
    (int8(1_000_000), "1,000,000 (1,000.0 KB)"),
    (int8(1_000_004), "1,000,004 (1.0 MB)"),
    (int8(3 * 10**12), "3,000,000,000,000 (3,000.0 GB)"),
    (np.ones((2, 3), np.float32), "6 (24 B)"),
    ({"a": np.ones(2), "b": "x"}, "2 (16 B)"),
    (jnp.ones((0, 3)), ""),
    ((2, 3), ""),
    ({1: np.ones(2), "a": 1}, ""),
    ids=repr,
)
def test_size_of_a_value(value, expected):
    assert first_line(nnx.Param(value)) == expected


def test_sizes_by_type_have_a_total_and_count_each_variable_once():
    shared = nnx.Param(jnp.ones(3))
    model = module(
        nnx.Module,
        a=nnx.BatchStat(jnp.ones(2)),
        b=nnx.Param(1),
        c=nnx.data([shared, {"x": shared}]),
        d=nnx.Param(np.ones(1)),
    )
    model.itself = model
    assert first_line(model) == "BatchStat: 2 (8 B), Param: 4 (20 B), Total: 6 (28 B)"
    assert first_line(module(nnx.Module, a=nnx.Param(1))) == ""


class Table(nnx.reprlib.MappingReprMixin, dict):
    pass


class Row(nnx.reprlib.SequenceReprMixin, list):
    pass


def test_mixins_show_mappings_and_sequences_with_arrays_in_full():
    assert repr(Table(a=Row([1]))) == "Table({\n  'a': Row([\n    1\n  ])\n})"
    assert (repr(Table()), repr(Row())) == ("Table({})", "Row([])")
    model = module(nnx.Module, x=nnx.data(Row([jnp.ones(2)])), y=jnp.ones(2))
    assert "Array([1., 1.], dtype=float32)" in repr(model)
    assert "y=Array(shape=(2,)" in repr(model)


def test_classes_must_say_what_they_show():
    silent = type("Silent", (nnx.reprlib.Representable,), {})
    with pytest.raises(NotImplementedError, match="Silent"):
        repr(silent())


# --------------------------------------------------------------------- the peer


def cyclic(n):
    model = module(n.Module, a=1, b=module(n.Module))
    model.c, model.itself = model.b, model
    return model


EXPRESSIONS = {
    "array": lambda n: n.Param(jnp.ones((2, 3)), tag="x"),
    "number": lambda n: n.Param(1),
    "none": lambda n: n.Param(None),
    "numpy": lambda n: n.Param(np.ones(3), a=None, out_sharding=None),
    "pytree": lambda n: n.Param({"a": jnp.ones(3), "b": [1, 2]}),
    "large": lambda n: n.Param(jnp.ones((1000, 300))),
    "text": lambda n: n.Param("a\nb"),
    "abstract": lambda n: n.Param(jax.ShapeDtypeStruct((2, 3), jnp.float32)),
    "empty": lambda n: n.Param(jnp.ones((0, 3))),
    "key": lambda n: n.Param(jax.random.key(0)),
    "nested": lambda n: n.Param(n.Param(1)),
    "ref": lambda n: n.Param(jnp.ones(3), ref=True),
    "metadata": lambda n: n.Param(1, f=len, t=(1, "a"), d={"a": 1}, c=int),
    "rngs": lambda n: n.Rngs(0, params=1),
    "module": lambda n: module(
        n.Module,
        a=n.Param(jnp.ones((2, 3))),
        b=jnp.ones(()),
        _c=1,
        d=(int, jnp.float32),
    ),
    "module with arrays": lambda n: module(
        n.Module,
        a=np.ones(4),
        b=n.data({"c": jnp.ones(3), "d": n.Param(1)}),
        _e=jnp.ones(2),
    ),
    "module with ref": lambda n: module(n.Module, a=n.Param(jnp.ones(3), ref=True)),
    "types": lambda n: module(
        n.Module, z=n.Cache(jnp.ones(2)), a=n.Param(jnp.ones(2)), m=module(n.Module)
    ),
    "cyclic": cyclic,
    "shapes": lambda n: jax.tree.map(
        jnp.shape, module(n.Module, b=n.Param(jnp.ones((2, 3))))
    ),
    "state": lambda n: n.State({"a": n.Param(jnp.ones(3)), "b": {"c": 1, "d": {}}}),
    "state in module": lambda n: module(
        n.Module, s=n.data(n.State({"a": jnp.ones(3)}))
    ),
    "module in state": lambda n: n.State({"m": module(n.Module, a=jnp.ones(3))}),
    "flat state": lambda n: n.FlatState([(("a",), n.Param(jnp.ones(3)))], sort=True),
    "list": lambda n: [n.State({"a": {"b": 1}}), (n.Param(1),)],
}


@pytest.mark.peers
@pytest.mark.parametrize("name", EXPRESSIONS)
def test_text_equals_that_of_the_peer(name):
    peer = pytest.importorskip("flax.nnx")
    expression = EXPRESSIONS[name]
    assert repr(expression(nnx)) == repr(expression(peer))


# ----------------------------------------------------------------------- what dir lists


class Model(zoo.Box):
    setting = 1

    def _helper(self):
        pass


def model():
    return Model(linear=nnx.Linear(2, 3, rngs=nnx.Rngs(0)), _mine=2)


OBJECTS = {
    "class": lambda: Model,
    "module": model,
    "layer": lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(0)),
    "attention": lambda: nnx.MultiHeadAttention(2, 4, rngs=nnx.Rngs(0)),
    "variable class": lambda: nnx.Param,
    "variable": lambda: nnx.Param(jnp.ones(2), tag="x"),
    "state": lambda: nnx.state(model()),
    "graph state": lambda: nnx.unpack(model()),
    "rngs": lambda: nnx.Rngs(0),
    "list": lambda: nnx.List([1]),
    "dict": lambda: nnx.Dict(a=1),
    "namespace": lambda: nnx,
    "sub-module": lambda: nnx.variablelib,
    "layers": lambda: nnx.nn,
    "older forms": lambda: nnx.compat,
}


@pytest.mark.parametrize("make", OBJECTS.values(), ids=OBJECTS)
def test_what_is_listed_exists_and_is_public(make):
    x = make()
    listed = dir(x)
    private = {n for n in listed if n.startswith("_") and not n.startswith("__")}
    assert private <= {"_mine", "_helper"} and all(map(str.isidentifier, listed))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # What an array of JAX lists as well, and does not have.
        lost = [n for n in listed if n not in dir(jax.Array) and not hasattr(x, n)]
    assert lost in ([], ["__abstractmethods__"])


def test_everything_of_a_users_class_is_listed():
    names = {"setting", "linear", "_mine", "_helper", "train", "set_attributes", "sow"}
    assert names <= set(dir(model()))
    assert names - {"linear", "_mine"} <= set(dir(Model))
    assert {"linear", "items"} <= set(dir(nnx.state(model())))
    assert "linear" in dir(nnx.unpack(model()))


def test_variables_list_their_metadata_and_what_their_value_has():
    assert {"tag", "mean", "T", "at", "get_value"} <= set(
        dir(nnx.Param(jnp.ones(2), ref=True, tag="x"))
    )
    assert "mean" not in dir(nnx.Param("text")) and "upper" in dir(nnx.Param("text"))


def test_the_namespace_lists_its_names_and_sub_modules():
    listed = {name for name in dir(nnx) if not name.startswith("_")}
    modules = {"compat", "variablelib", "graphlib", "debugging", "bridge", "reprlib"}
    assert set(nnx.__all__) | modules <= listed
    assert not listed & {"core", "interop", "annotations", "use_refs"}


def test_sub_modules_list_names_before_they_are_used():
    assert {"Param", "VariableMeta", "is_array_ref"} <= set(dir(nnx.variablelib))
    assert {"linear", "attention", "dtypes"} <= set(dir(nnx.nn))
    assert {"linear", "VariableMeta"} & set(vars(nnx.nn)) == {"linear"}


@pytest.mark.peers
def test_what_the_peer_lists_is_listed():
    peer = pytest.importorskip("flax.nnx")

    def public(x):
        return {name for name in dir(x) if not name.startswith("_")}

    for make in (
        lambda n: n.Linear(2, 3, rngs=n.Rngs(0)),
        lambda n: n.Param(jnp.ones(2)),
        lambda n: n.Rngs(0),
        lambda n: n.Dict(a=1),
        lambda n: n.State({"a": 1}),
    ):
        assert public(make(peer)) <= public(make(nnx))
