"""Tables: which tensors a model has, and which tables are refused."""

import jax.numpy as jnp
import pytest

import graftree as nnx
from tests import zoo


def make_block(rngs):
    return zoo.Box(
        up=nnx.Linear(2, 3, rngs=rngs),
        norm=nnx.LayerNorm(3, rngs=rngs),
        scale=nnx.Param(jnp.ones(3)),
    )


def make_net(make_blocks):
    rngs = nnx.Rngs(0)
    blocks = make_blocks(make_block, rngs)
    return zoo.Box(embed=nnx.Embed(5, 2, rngs=rngs), blocks=blocks)


def listed(make, rngs):
    return nnx.List([make(rngs) for _ in range(2)])


def stacked(make, rngs):
    return nnx.Stack(make, 2, rngs=rngs)


def names(mapping, model):
    return [tensor.name for tensor in nnx.weights.Mapping(mapping).tensors(model)]


TABLE = {"wte": "embed", "h.{i}.fc": "blocks[{i}].up", "h.{i}": "blocks[{i}]"}
OF_BLOCK = ["fc.weight", "fc.bias", "norm.weight", "norm.bias", "scale"]
NAMES = ["wte.weight", *(f"h.{i}.{name}" for i in (0, 1) for name in OF_BLOCK)]


@pytest.mark.parametrize("make_blocks", [listed, stacked], ids=["list", "stack"])
def test_one_table_fits_a_list_and_a_stack(make_blocks):
    assert names(TABLE, make_net(make_blocks)) == NAMES


def test_a_path_that_names_the_array_below_a_stack_is_stacked_too():
    model = make_net(stacked)
    table = {"h.{i}.w": "blocks.layers.up.kernel"}
    tensors = nnx.weights.Mapping(table).tensors(model)
    found = [(t.name, t.at, t.solved.file_shape) for t in tensors]
    assert found == [("h.0.w", (0,), (3, 2)), ("h.1.w", (1,), (3, 2))]


def test_indices_may_be_attributes_of_the_path():
    model = make_net(listed)
    assert names({"a.{n}": "blocks.{n}.scale"}, model) == ["a.0", "a.1"]
    assert names({"a": "blocks[1].scale"}, model) == ["a"]
    assert names({"a": "blocks.1.scale"}, model) == ["a"]


def test_the_empty_path_is_the_model():
    model = nnx.Dict(a=nnx.Linear(2, 3, rngs=nnx.Rngs(0)), b=nnx.Param(jnp.ones(2)))
    assert names({"model": ""}, model) == ["model.a.weight", "model.a.bias", "model.b"]
    assert names({"": ""}, model) == ["a.weight", "a.bias", "b"]


def test_random_streams_and_caches_are_no_weights():
    model = nnx.Dict(
        a=nnx.Dropout(0.5, rngs=nnx.Rngs(0)), b=nnx.Cache(jnp.ones(2)), c=nnx.Param(1.0)
    )
    model.c.set_value(jnp.ones(()))
    assert names({"": ""}, model) == ["c"]


def test_layers_of_a_list_may_differ():
    rngs = nnx.Rngs(0)
    blocks = nnx.List([zoo.Box(norm=nnx.Param(jnp.ones(2))) for _ in "123"])
    for i in (0, 2):
        blocks[i].up = nnx.Linear(2, 3, use_bias=False, rngs=rngs)
    blocks[1].experts = nnx.List([nnx.Linear(2, 3, rngs=rngs) for _ in "12"])
    blocks[0].shortcut = nnx.data(None)
    blocks[2].shortcut = zoo.Box(gain=nnx.Param(jnp.ones(2)))
    model = zoo.Box(blocks=blocks)
    table = {
        "h.{i}.norm": "blocks[{i}].norm",
        "h.{i}.up": "blocks[{i}].up",
        "h.{i}.e.{e}.w": "blocks[{i}].experts[{e}].kernel",
        "h.{i}.gain": "blocks[{i}].shortcut.gain",
    }
    assert names(table, model) == [
        *("h.0.norm", "h.0.up.weight", "h.1.norm", "h.2.norm", "h.2.up.weight"),
        *("h.1.e.0.w", "h.1.e.1.w"),
        "h.2.gain",
    ]
    with pytest.raises(ValueError, match=r"blocks\[0\] has no 'down'"):
        names({"h.{i}.down": "blocks[{i}].down"}, model)
    with pytest.raises(ValueError, match="layers of different indices"):
        one = ["blocks[{i}].shortcut.gain", "blocks[{i}].experts[0].bias"]
        names({"h.{i}": (one, "+o -> o")}, model)


def test_keys_of_a_path_may_be_tuples_and_names_may_not():
    layer = nnx.WeightNorm(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1))
    for path in ("scales['kernel',]", "scales[('kernel',)]"):
        assert names({"g": path}, layer) == ["g"]
    with pytest.raises(TypeError, match="join them first"):
        nnx.weights.Mapping({("a", "b"): "c"})


REFUSED = {
    "an index from nowhere": ({"a": "blocks[{i}].up"}, "'i' of 'blocks"),
    "a brace": ({"a.{i": "embed"}, "is no name of tensors"),
    "a malformed path": ({"a": "blocks["}, "is malformed: expected a step at"),
    "a path twice": ({"a": "embed", "b": "embed"}, "is in the line 'a' too"),
    "two spellings": ({"a": "blocks[0].up", "b": "blocks.0.up"}, "in the line 'a' too"),
    "a layout without inverse": ({"a": ("embed", "o i -> o")}, "is refused"),
}


@pytest.mark.parametrize(("table", "reason"), REFUSED.values(), ids=REFUSED)
def test_refused_when_the_table_is_made(table, reason):
    with pytest.raises(ValueError, match=reason):
        nnx.weights.Mapping(table)


@pytest.mark.parametrize(
    "value",
    [None, 3, ["a", "b"], ("a",), (["a"], "o -> o"), ("a", "o -> o", 2)],
    ids=str,
)
def test_lines_of_another_form(value):
    with pytest.raises(TypeError, match="has another form"):
        nnx.weights.Mapping({"x": value})


UNFIT = {
    "nowhere": ({"a": "block"}, "has no 'block'"),
    "no list": ({"a.{i}": "embed[{i}]"}, "without elements"),
    "other rank": ({"a": ("blocks[0].scale", "o i -> i o")}, "2 axes on its right"),
    "the same array twice": (
        {"a": "blocks[0].scale", "b.{i}": "blocks[{i}].scale"},
        "is 'a' of the file already",
    ),
    "the same name twice": (
        {"h.0": "embed.embedding", "h.{i}": "blocks[{i}].scale"},
        "several lines lead to this name",
    ),
    "a layer": ({"a": ("blocks[0].up", "o i -> i o")}, "Linear, which holds no single"),
    "one index, two lists": (
        {"a.{i}": (["blocks[{i}].scale", "embed.embedding"], "+o -> o")},
        "different numbers",
    ),
}


@pytest.mark.parametrize(("table", "reason"), UNFIT.values(), ids=UNFIT)
def test_refused_with_a_model(table, reason):
    mapping = nnx.weights.Mapping(table)
    with pytest.raises(ValueError, match=reason):
        mapping.tensors(make_net(listed))


def test_ignored_names():
    mapping = nnx.weights.Mapping({}, ignore=["**.inv_freq", "a[0].b"])
    assert mapping.ignores("x.y.inv_freq")
    assert mapping.ignores("a[0].b")
    assert not mapping.ignores("inv_freq.x")


@pytest.mark.parametrize("path", ["head.bais", "heads[{i}].bias", "head[{i}]"])
def test_a_path_that_leads_nowhere_is_a_plain_value_error(path):
    model = nnx.Dict(head=nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="leads nowhere|without elements") as caught:
        nnx.weights.Mapping({"x.{i}": path}).tensors(model)
    assert type(caught.value) is ValueError
