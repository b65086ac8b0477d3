"""What objects say about themselves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx


def module(base, **attributes):
    """A module of this library or of the peer."""

    class Model(base):
        def __init__(self):
            for name, value in attributes.items():
                setattr(self, name, value)

    return Model()


def first_line(x):
    """What the first line of a text says of sizes."""
    return repr(x).splitlines()[0].partition("( # ")[2]


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (24, "24 B"),
        (1000, "1,000 B"),
        (1004, "1.0 KB"),
        (8008, "8.0 KB"),
        (1_000_000, "1,000.0 KB"),
        (1_000_004, "1.0 MB"),
        (3 * 10**12, "3,000.0 GB"),
    ],
)
def test_bytes_are_given_in_powers_of_1000(count, expected):
    value = jax.ShapeDtypeStruct((count,), jnp.int8)
    assert first_line(nnx.Param(value)) == f"{count:,} ({expected})"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (jnp.ones((2, 3)), "6 (24 B)"),
        ({"a": np.ones(2), "b": "x"}, "2 (16 B)"),
        (jax.ShapeDtypeStruct((250,), jnp.float32), "250 (1,000 B)"),
        (jnp.ones((0, 3)), ""),
        ((2, 3), ""),
        ({1: jnp.ones(2), "a": 1}, ""),
    ],
    ids=["array", "dict", "abstract", "empty", "shape", "mixed keys"],
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


def test_metadata_at_its_default_is_hidden():
    assert repr(nnx.Param(1)) == "Param(\n  value=1\n)"
    assert repr(nnx.Param(1, eager_sharding=False)).endswith("eager_sharding=False\n)")
    assert repr(nnx.Param(jnp.ones(()), ref=True)).endswith("ref=True\n)")


def test_mixins_show_mappings_and_sequences():
    class Table(nnx.reprlib.MappingReprMixin, dict):
        pass

    class Row(nnx.reprlib.SequenceReprMixin, list):
        pass

    assert repr(Table(a=Row([1]))) == "Table({\n  'a': Row([\n    1\n  ])\n})"
    assert (repr(Table()), repr(Row())) == ("Table({})", "Row([])")


def test_arrays_of_a_mixin_are_in_full_also_in_a_node():
    class Row(nnx.reprlib.SequenceReprMixin, list):
        pass

    model = module(nnx.Module, x=nnx.data(Row([jnp.ones(2)])), y=jnp.ones(2))
    assert "Array([1., 1.], dtype=float32)" in repr(model)
    assert "y=Array(shape=(2,)" in repr(model)


def test_classes_must_say_what_they_show():
    class Silent(nnx.reprlib.Representable):
        pass

    with pytest.raises(NotImplementedError, match="Silent"):
        repr(Silent())


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
