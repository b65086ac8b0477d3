"""Tables, their layouts, and drafts of them: which tensors a model has."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from examples.models import llama
from tests import tables, tiny_llamas, zoo
from tests.comparisons import raises


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
    tensors = nnx.weights.Mapping({"h.{i}.w": "blocks.layers.up.kernel"}).tensors(model)
    found = [(t.name, t.at, t.solved.file_shape) for t in tensors]
    assert found == [("h.0.w", (0,), (3, 2)), ("h.1.w", (1,), (3, 2))]


SINGLE = {"first.fc": "blocks[0].up", "first": "blocks[0]", "then": "blocks[1]"}


@pytest.mark.parametrize("make_blocks", [listed, stacked], ids=["list", "stack"])
def test_single_layers_and_an_index_fill_the_same_arrays(make_blocks):
    by_index, by_number = make_net(make_blocks), make_net(make_blocks)
    weights = {
        tensor.name: np.random.default_rng(n).normal(size=tensor.solved.file_shape)
        for n, tensor in enumerate(nnx.weights.Mapping(TABLE).tensors(by_index))
    }
    nnx.weights.load(weights, by_index, TABLE, dtype=jnp.float32)
    renamed = {
        name.replace("h.0", "first").replace("h.1", "then"): x
        for name, x in weights.items()
    }
    table = {"wte": "embed", **SINGLE, "then.fc": "blocks[1].up"}
    nnx.weights.load(renamed, by_number, table, dtype=jnp.float32)
    for one, other in zip(*map(jax.tree.leaves, (by_index, by_number)), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ({"a": "blocks[0]"}, r"'a.*layer of blocks.*no line leads to \[1\] there"),
        ({"a": "blocks[2]"}, r"'blocks\[2\]' .* leads nowhere"),
        ({"a": "blocks[-1]"}, "leads nowhere|malformed"),
        ({"a.{i}": "blocks[{i}]", "b": "blocks[1]"}, "is already in the line"),
        (
            {"a": ("blocks.layers.scale", "l d -> l d"), "b": "blocks[1].scale"},
            "is already in the line",
        ),
    ],
    ids=lambda x: str(x)[:20],
)
def test_layers_of_a_stack_are_all_in_the_table_and_none_twice(lines, message):
    with pytest.raises(ValueError, match=message):
        names(lines, make_net(stacked))


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
    "a brace": ({"a.{i": "embed"}, "is not a name of tensors"),
    "a malformed path": ({"a": "blocks["}, "is malformed: expected a step at"),
    "a path twice": ({"a": "embed", "b": "embed"}, "is in the line 'a' too"),
    "two spellings": ({"a": "blocks[0].up", "b": "blocks.0.up"}, "in the line 'a' too"),
    "a layout without inverse": ({"a": ("embed", "o i -> o")}, "is invalid"),
}


@pytest.mark.parametrize(("table", "reason"), REFUSED.values(), ids=REFUSED)
def test_refused_when_the_table_is_made(table, reason):
    with pytest.raises(ValueError, match=reason):
        nnx.weights.Mapping(table)


@tables.cases(
    "value", None, 3, ["a", "b"], ("a",), (["a"], "o -> o"), ("a", "o -> o", 2), ids=str
)
def test_lines_of_another_form(value):
    with pytest.raises(TypeError, match="is malformed"):
        nnx.weights.Mapping({"x": value})


UNFIT = {
    "nowhere": ({"a": "block"}, "has no 'block'"),
    "no list": ({"a.{i}": "embed[{i}]"}, "without elements"),
    "other rank": ({"a": ("blocks[0].scale", "o i -> i o")}, "2 axes on its right"),
    "the same array twice": (
        {"a": "blocks[0].scale", "b.{i}": "blocks[{i}].scale"},
        "is already in the line 'a'",
    ),
    "the same name twice": (
        {"h.0": "embed.embedding", "h.{i}": "blocks[{i}].scale"},
        "several lines lead to this name",
    ),
    "a layer": ({"a": ("blocks[0].up", "o i -> i o")}, "Linear, which is not a single"),
    "one index, two lists": (
        {"a.{i}": (["blocks[{i}].scale", "embed.embedding"], "+o -> o")},
        "different numbers",
    ),
}


@pytest.mark.parametrize(("table", "reason"), UNFIT.values(), ids=UNFIT)
def test_refused_with_a_model(table, reason):
    mapping = nnx.weights.Mapping(table)
    with pytest.raises(ValueError, match=reason) as caught:
        mapping.tensors(make_net(listed))
    assert type(caught.value) is ValueError


# ------------------------------------------------------------------------------- drafts


def test_the_table_of_llama_is_found():
    model = nnx.eval_shape(lambda: llama.Llama(tiny_llamas.CONFIG, rngs=nnx.Rngs(0)))
    tensors = nnx.weights.Mapping(llama.WEIGHTS).tensors(model)
    weights = {t.name: np.zeros(t.solved.file_shape, np.float32) for t in tensors}
    draft = nnx.weights.draft(weights, model)
    assert dict(draft.entries) == llama.WEIGHTS and not draft.names
    assert not draft.paths
    table = eval(str(draft), {"nnx": nnx})  # what it prints is the table
    nnx.weights.load(weights, model, table)


@pytest.mark.parametrize("stacked", [False, True])
def test_blocks_are_one_line_in_a_list_and_in_a_stack(stacked):
    def make(rngs):
        return nnx.Linear(2, 3, rngs=rngs)

    rngs = nnx.Rngs(0)
    layers = [make(rngs) for _ in range(2)]
    blocks = nnx.Stack(make, 2, rngs=rngs) if stacked else nnx.List(layers)
    weights = {f"h.{i}.weight": np.zeros((3, 2)) for i in range(2)}
    weights |= {f"h.{i}.bias": np.zeros(3) for i in range(2)}
    draft = nnx.weights.draft(weights, nnx.Dict(blocks=blocks))
    assert dict(draft.entries) == {"h.{i}": "blocks[{i}]"}


def test_what_has_no_counterpart_is_listed():
    model = nnx.Dict(a=nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    draft = nnx.weights.draft({"b.weight": np.zeros((9, 9))}, model)
    assert not draft.entries and draft.names == {"b.weight": (9, 9)}
    assert draft.paths == {"a.bias": (3,), "a.weight": (3, 2)}
    assert "# in the file: 'b.weight' [9, 9]" in str(draft)


def test_equal_shapes_and_names_are_doubtful():
    def layer():
        return nnx.Linear(2, 2, use_bias=False, rngs=nnx.Rngs(0))

    model = nnx.Dict(one=layer(), two=layer())
    weights = {"x.weight": np.zeros((2, 2)), "y.weight": np.zeros((2, 2))}
    draft = nnx.weights.draft(weights, model)
    assert {*draft.entries} == {"x", "y"} and draft.doubtful
    assert "# or " in str(draft)


def test_attention_is_what_the_file_has():
    layer = nnx.MultiHeadAttention(2, 6, use_bias=False, decode=False, rngs=nnx.Rngs(0))
    model = nnx.Dict(attention=layer)
    fused = {"attn.in_proj_weight": np.zeros((18, 6))}
    fused["attn.out_proj.weight"] = np.zeros((6, 6))
    assert {*nnx.weights.draft(fused, model).names} == {*fused}
    names = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "out"}
    weights = {f"attn.{name}.weight": np.zeros((6, 6)) for name in names}
    draft = nnx.weights.draft(weights, model)
    assert dict(draft.entries) == {
        f"attn.{name}": f"attention.{path}" for name, path in names.items()
    }


@tables.cases("name", "layers.{i}.self_attn.qkv_proj", "h.{i}.qkv", "h.{i}.attn.c_attn")
def test_attention_is_not_taken_for_an_mlp_of_its_shape(name):
    def block():
        up = nnx.Linear(2, 6, use_bias=False, rngs=nnx.Rngs(0))
        return nnx.Dict(mlp=nnx.Dict(up=up))

    model = nnx.Dict(blocks=nnx.List([block(), block()]))
    weights = {f"{name.format(i=i)}.weight": np.zeros((6, 2)) for i in range(2)}
    draft = nnx.weights.draft(weights, model)
    assert not draft.entries and {*draft.names} == {f"{name}.weight"}
    assert {*draft.paths} == {"blocks[{i}].mlp.up.weight"}


# ------------------------------------------------------------------------------ layouts


rng = np.random.default_rng(0)

# Layout, shapes of our arrays, the tensor by NumPy, and the sizes that are given.
CASES = {
    "transposed": ("o i -> i o", [(3, 4)], lambda x: x.T),
    "split": ("(h d) e -> e h d", [(5, 2, 3)], lambda x: x.reshape(5, 6).T),
    "joined": ("a b -> (a b)", [(12,)], lambda x: x.reshape(3, 4), {"a": 3}),
    "conv": ("o i h w -> h w i o", [(2, 3, 4, 5)], lambda x: x.transpose(3, 2, 0, 1)),
    "reversed": ("i o ~k -> k i o", [(4, 2, 3)], lambda x: x[::-1].transpose(1, 2, 0)),
    "an axis of one": ("o 1 -> o", [(4,)], lambda x: x[:, None]),
    "a scalar": ("->", [()], lambda x: x),
    "one after the other": (
        "+(h d) e -> e h d",
        [(5, 4, 3), (5, 2, 3), (5, 2, 3)],
        lambda *xs: np.concatenate([x.reshape(5, -1).T for x in xs]),
    ),
    "the same, last": ("e +f -> e f", [(3, 4), (3, 5)], lambda *xs: np.hstack(xs)),
    "in turn": (
        "(h part d) e -> e h d",
        [(5, 4, 3)] * 3,
        lambda *xs: np.stack([x.transpose(1, 2, 0) for x in xs], 1).reshape(-1, 5),
    ),
    "within groups": (
        "(g +h d) e -> e (g h) d",
        [(5, 8, 3), (5, 2, 3)],
        lambda q, k: (
            np.concatenate([q.reshape(5, 2, 4, 3), k.reshape(5, 2, 1, 3)], 2)
            .reshape(5, -1)
            .T
        ),
        {"g": 2},
    ),
    "empty": ("o i -> i o", [(0, 4)], lambda x: x.T),
}


def mapping(layout, sizes=None, count=1):
    """A table of one line, for so many arrays."""
    paths = [*"abc"[:count]]
    line = (paths[0] if count == 1 else paths), layout, sizes or {}
    return nnx.weights.Mapping({"tensor": line})


def solved(layout, shapes, sizes=None):
    """The layout with the sizes that arrays have."""
    arrays = [nnx.Param(np.zeros(shape)) for shape in shapes]
    model = nnx.Dict(dict(zip("abc", arrays, strict=False)))
    (tensor,) = mapping(layout, sizes, len(shapes)).tensors(model)
    return tensor.solved


@pytest.mark.parametrize("case", CASES)
def test_both_directions_are_as_numpy_says(case):
    layout, shapes, expected, *sizes = CASES[case]
    found = solved(layout, shapes, *sizes)
    arrays = [rng.normal(size=shape) for shape in shapes]
    tensor = found.to_file(arrays)
    np.testing.assert_array_equal(tensor, expected(*arrays))
    assert tensor.shape == found.file_shape
    view = tensor.reshape(found.view_shape)
    for part, array in enumerate(arrays):
        for _ in range(20):
            index = tuple(_random_slice(size) for size in array.shape)
            piece = found.read(part, index, lambda i: view[i])
            np.testing.assert_array_equal(piece, array[index])


def _random_slice(size):
    start, stop = sorted(rng.integers(0, size + 1, 2))
    return slice(start, stop)


def test_only_the_wanted_elements_are_asked_for():
    asked = []

    def get(index):
        asked.append(math.prod(piece.stop - piece.start for piece in index))
        return np.zeros([piece.stop - piece.start for piece in index])

    found = solved("+(h d) e -> e h d", [(8, 4, 2), (8, 2, 2)])
    found.read(1, (slice(0, 4), slice(1, 2), slice(0, 2)), get)
    assert asked == [4 * 1 * 2]


NO_LAYOUTS = {
    "o i": "needs one '->'",
    "a -> b -> c": "needs one '->'",
    "o i -> o": "'i' is on one side only",
    "a -> (a b)": "'b' is on one side only",
    "o i -> i o o": "'o' occurs twice",
    "(o i -> i o": "can't be read",
    "((o) i) -> o i": "can't be read",
    "o i -> i ~o": "belong on the left",
    "o i -> i +o": "belong on the left",
    "o -> o 2": "can't be read",
    "o i j -> (o i) j": "all but one need a size",
    "part o -> o": "need several paths",
    "+o i -> i o": "need several paths",
}


@pytest.mark.parametrize("text", NO_LAYOUTS)
def test_what_has_no_inverse_is_refused(text):
    with raises(ValueError, "is invalid", NO_LAYOUTS[text]):
        mapping(text)


@pytest.mark.parametrize("text", ["o i -> i o", "+o +i -> i o", "part +o -> o"])
def test_several_arrays_need_one_place(text):
    with pytest.raises(ValueError, match="2 arrays in one tensor"):
        mapping(text, count=2)


@pytest.mark.parametrize("sizes", [{"x": 2}, {"o": 0}, {"o": 2.0}])
def test_sizes_are_of_axes_and_positive(sizes):
    with pytest.raises(ValueError, match="is of no use"):
        mapping("(o p) -> o p", sizes)


@tables.cases(
    "layout, shapes, sizes, reason",
    ("(g h) -> (h g)", [(8,)], {"g": 3}, "can't split 8"),
    ("(g h) -> (h g)", [(3, 4)], {"g": 3}, "1 axes on its right"),
    ("+o i -> i o", [(2, 4), (3, 4)], None, r"i has the sizes \[2, 3\]"),
)
def test_shapes_that_do_not_fit(layout, shapes, sizes, reason):
    with pytest.raises(ValueError, match=reason):
        solved(layout, shapes, sizes)
