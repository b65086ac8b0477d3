"""When a text is the full one, and what the compact one says."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import zoo

HINT = " # shortened; in full: print(nnx.debugging.full_repr(...))"


class Node(zoo.Box):
    """A Module with the attributes that it is given."""


@pytest.fixture
def lines():
    """Sets how many lines a full text may have."""
    yield functools.partial(nnx.config.update, "graftree_repr_lines")
    nnx.config.update("graftree_repr_lines", 150)


@pytest.fixture
def compact(lines):
    """The compact form of any object, without its hint."""

    def text(x):
        lines(0)
        assert repr(x).endswith(HINT)
        return repr(x).removesuffix(HINT)

    return text


class Block(nnx.Module):
    def __init__(self, features, rngs):
        self.norm = nnx.LayerNorm(features, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(12, features, decode=False, rngs=rngs)
        self.up = nnx.Linear(features, 4 * features, rngs=rngs)
        self.down = nnx.Linear(4 * features, features, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)


class Transformer(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(50_257, 768, rngs=rngs)
        self.blocks = nnx.List(Block(768, rngs) for _ in range(12))
        self.head = nnx.Linear(768, 50_257, use_bias=False, rngs=rngs)


@pytest.fixture(scope="module")
def transformer():
    return nnx.eval_shape(lambda: Transformer(nnx.Rngs(0)))


# --------------------------------------------------------------------- which form


@pytest.mark.parametrize("view", [lambda m: m, nnx.state, lambda m: (nnx.state(m),)])
def test_a_transformer_fits_a_screen(transformer, view):
    text = repr(view(transformer))
    assert len(text.splitlines()) <= 45
    assert "12 x " in text and "abstract float32[768,3072]" in text


def test_the_first_line_has_the_totals(transformer):
    count = sum(x.size for x in jax.tree.leaves(nnx.state(transformer, nnx.Param)))
    size = f"{count:,} ({4 * count / 1e6:,.1f} MB)"
    first = repr(transformer).splitlines()[0]
    assert first.startswith(f"Transformer( # Param: {size}, RngState: ")
    assert first == nnx.debugging.full_repr(transformer).splitlines()[0]


def test_a_text_is_full_up_to_the_limit(lines):
    model = nnx.List([nnx.Linear(2, 3, rngs=nnx.Rngs(0)) for _ in range(3)])
    full = nnx.debugging.full_repr(model)
    count = len(full.splitlines())
    for limit, is_full in ((count, True), (count - 1, False), (None, True)):
        lines(limit)
        assert (repr(model) == full) is is_full and repr(model) == str(model)


def test_a_text_within_a_text_has_its_form(compact):
    class Foreign:
        def __repr__(self):
            return f"<{Node(a=1)!r}>"

    assert compact(Node(x=Foreign())) == "Node(\n  x=<Node(...\n)"


def test_an_array_counts_as_about_the_lines_that_it_takes(lines):
    table = nnx.Dict(table=nnx.Param(np.arange(96.0).reshape(3, 32)))
    written = nnx.debugging.full_repr(table)
    lines(written.count("\n") * 3 // 2)
    assert repr(table) == written
    lines(written.count("\n") * 2 // 3)
    assert repr(table).endswith(HINT)


def test_a_variable_of_an_array_is_never_shortened(lines):
    lines(0)
    text = repr(nnx.Param(jnp.ones(2)))
    assert text.splitlines()[1] == "  value=Array([1., 1.], dtype=float32)"
    assert len(repr(nnx.Param(np.ones((200, 1)))).splitlines()) == 202


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda x: nnx.List([x]),
        lambda x: nnx.Dict(a=x),
        lambda x: nnx.State({"a": nnx.Param(x)}),
        lambda x: nnx.to_flat_state(nnx.State({"a": x})),
    ],
)
def test_containers_show_the_values_of_few_numbers_only(wrapped):
    assert "Array([0., 0., 0.], dtype=float32)" in repr(wrapped(jnp.zeros(3)))
    large = wrapped(jnp.zeros(101))
    assert "Array(shape=(101,), dtype=dtype('float32'))" in repr(large)
    assert "0., 0." in nnx.debugging.full_repr(large)


def test_no_array_is_read_for_a_compact_text(lines, monkeypatch):
    array = jnp.ones((2, 2))
    state = nnx.State({i: {"a": array, "b": nnx.Param(array + i)} for i in range(9)})
    model = Node(x=nnx.data(state), z=nnx.data([array]), rngs=nnx.Rngs(0))

    def read(self):
        raise AssertionError("an array was read")

    monkeypatch.setattr(type(array), "_value", property(read))
    lines(10)
    assert repr(state).endswith(HINT) and repr(model).endswith(HINT)


def test_texts_under_a_trace_add_nothing_to_the_program(compact):
    def f(x):
        model = Node(a=nnx.Param(x), b=nnx.Param(x, ref=True))
        expected = "Node( # Param: 6 (24 B)\n  a=Param(float32[3]),\n"
        assert compact(model) == expected + "  b=Param(ref float32[3], ref=True)\n)"
        return x

    primitives = [str(e.primitive) for e in jax.make_jaxpr(f)(jnp.ones(3)).eqns]
    assert "get" not in primitives and len(primitives) <= 2  # that make the ref


@pytest.mark.parametrize("limit", [0, None])
def test_what_fails_is_named_by_its_type(lines, limit):
    class Broken:
        def __repr__(self):
            raise ValueError("no")

    class Failing(nnx.Param):
        def get_value(self, **options):
            raise ValueError("no")

    lines(limit)
    model = Node(a=Broken(), b=Failing(jnp.ones(2)), c=jnp.ones(3))
    model.c.delete()
    assert "a=<Broken, whose repr raises ValueError>" in repr(model)
    assert ("deleted float32[3]" if limit == 0 else "Array(shape=(3,)") in repr(model)


def test_a_compact_text_is_coloured_like_a_full_one_in_as_many_lines(lines):
    model = Node(a=nnx.Param(jnp.ones(3)), b=[1, None, jnp.float32])
    model.x = Node(**{f"name{i}": i for i in range(8)})
    lines(0)
    text = nnx.reprlib.get_repr(model, color=nnx.reprlib.COLOR)
    for code in nnx.reprlib.COLOR:
        text = text.replace(code, "")
    assert text == repr(model)


# ---------------------------------------------------------------------- what it says


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (jnp.ones((2, 3)), "float32[2,3]"),
        (np.ones(2), "numpy float64[2]"),
        (jax.ShapeDtypeStruct((), jnp.int8), "abstract int8[]"),
        (jax.random.key(0), "key<fry>[]"),
        (nnx.Param(jnp.ones(2), tag="x"), "Param(float32[2], tag='x')"),
        (nnx.Param({"a": jnp.ones(2)}), "Param({'a': float32[2]})"),
        (jax.nn.relu, "relu"),
        (jnp.dtype("int32"), "int32"),
        (["a", (1,), {}], "['a', (1,), {}]"),
        (nnx.State({"a": {"b": 1}}), "State({'a': {'b': 1}})"),
        ("x" * 200, "'" + "x" * 59 + "..."),
    ],
)
def test_values_are_short(compact, value, expected):
    assert compact(Node(x=nnx.data(value))).splitlines()[1] == f"  x={expected}"


def test_attributes_at_their_defaults_are_left_out(compact):
    class Scaled(nnx.Linear):
        def __init__(self, *args, scale=2.0, **options):
            super().__init__(*args, **options)
            self.scale = scale

    rngs = nnx.Rngs(0)
    assert compact(Scaled(2, 3, rngs=rngs)).splitlines()[1:] == [
        "  kernel=Param(float32[2,3]),",
        "  bias=Param(float32[3]),",
        "  in_features=2, out_features=3",
        ")",
    ]
    assert compact(Scaled(2, 3, scale=2, rngs=rngs)).endswith(" scale=2\n)")


def test_no_comparison_of_arrays_or_foreign_objects_is_asked_for(compact):
    class Foreign:
        __hash__ = None

        def __eq__(self, other):
            raise AssertionError("compared")

        def __repr__(self):
            return "foreign"

    class Layer(nnx.Module):
        def __init__(self, x=Foreign(), y=np.ones(2), z=0):  # noqa: B008
            self.x, self.y, self.z = x, y, z

    changed = Layer(Foreign(), np.ones(2), np.ones(()))
    expected = "Layer(\n  x=foreign,\n  y=numpy float64[2],\n  z=numpy float64[]\n)"
    assert compact(changed) == expected
    assert compact(Layer()) == "Layer()"
    assert "x 2" not in compact(nnx.List([Layer(Foreign()), Layer(Foreign())]))


def test_named_tuples_show_their_fields(compact):
    import optax

    text = compact(
        nnx.Optimizer(Node(w=nnx.Param(jnp.ones(2))), optax.adam(1), wrt=nnx.Param)
    )
    assert "ScaleByAdamState(" in text and "count=OptArray(int32[])" in text
    assert "mu, nu=2 x State({'w': OptVariable(float32[2])})" in text


def test_the_middle_of_long_sequences_is_left_out(compact):
    text = compact(nnx.List([np.ones(i) for i in range(1000)]))
    assert "  ... 975 more ...,\n  numpy float64[995]," in text
    assert len(text.splitlines()) == 28


def test_deep_chains_and_cycles_end(lines, compact):
    node = Node()
    for _ in range(200):
        node = Node(inner=node)
    lines(150)
    assert "Node(...)" in repr(node) and len(repr(node).splitlines()) < 50
    model = Node(parts=nnx.List(nodes()))
    for part in model.parts:
        part.whole = model
    assert "3 x Node(w=Param(float32[2]), whole=Node(...))" in compact(model)
    cyclic = [1]
    cyclic.append(cyclic)
    text = compact(nnx.reprlib.PrettySequence(cyclic))
    assert text == "PrettySequence([\n  1,\n  [1, [...]]\n])"


# ---------------------------------------------------------------------------- folding


def nodes(count=3, **attributes):
    return [Node(w=nnx.Param(jnp.ones(2)), **attributes) for _ in range(count)]


def test_equal_siblings_are_folded(compact):
    assert compact(nnx.List(nodes(12))) == (
        "List([\n  (0-11) 12 x Node(w=Param(float32[2]))\n])"
    )
    rows = Node(**{f"layer_{i}": node for i, node in enumerate(nodes(12))})
    assert "\n  layer_0 to layer_11=12 x Node(w=Param(float32[2]))\n" in compact(rows)
    state = nnx.state(nnx.List(nodes(12)))
    assert compact(state) == ("State({\n  0 to 11: 12 x {'w': Param(float32[2])}\n})")
    query, key, value = nodes()
    pair = Node(query=query, key=key, last=value)
    assert "\n  query, key, last=3 x Node(w=Param(float32[2]))\n" in compact(pair)
    text = compact(nnx.List([x for node in nodes(9) for x in (node, Node(b=1))]))
    assert "(0, 2, ..., 16) 9 x Node(w=Param(float32[2]))" in text
    assert "(1, 3, ..., 17) 9 x Node(b=1)" in text
    node = [Node(a=nnx.Param(jnp.ones(2)), b=Node(**{"c" * 90: 1})) for _ in range(2)]
    assert "(0-1) 2 x Node( # each Param: 2 (8 B)\n" in compact(nnx.List(node))


def partial_of(x):
    def f():
        return x

    return f


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (1, 1.0),
        (1, True),
        (jnp.ones(2), jnp.ones(3)),
        (jnp.ones(2), jnp.ones(2, jnp.int32)),
        (jnp.ones(2), np.ones(2, np.float32)),
        (nnx.Param(1), nnx.Cache(1)),
        (nnx.Param(1), nnx.Param(1, tag="x")),
        ([1, [2]], [1, 2]),
        ({"a": 1}, {"b": 1}),
        (partial_of(1), partial_of(2)),
        (object(), object()),
        (Node(_hidden=1), Node(_hidden=2)),
        (Node(a=1), Node(b=1)),
    ],
)
def test_siblings_that_differ_are_not_folded(compact, first, second):
    pair = [Node(x=nnx.data(value)) for value in (first, second)]
    text = compact(nnx.List(pair))
    assert text.count("Node(x=") == 2 and " x Node" not in text


@pytest.mark.parametrize(
    "make",
    [
        lambda: float("nan"),
        lambda: partial_of([1, {"a": (2,)}]),
        lambda: jax.sharding.PartitionSpec("x", None),
        lambda: jnp.dtype("int8"),
        lambda: Node(a=nnx.data({"b": nnx.Rngs(0)})),
        lambda: nnx.State({"a": {"b": jnp.ones(2)}}),
    ],
)
def test_siblings_made_alike_are_folded(compact, make):
    pair = [Node(x=nnx.data(make())) for _ in range(2)]
    assert compact(nnx.List(pair)).startswith("List([\n  (0-1) 2 x Node(")


def test_what_all_folded_siblings_refer_to_is_the_same(compact):
    shared = Node(dim=3)
    text = compact(nnx.List(nodes(rope=shared)))
    row = "3 x Node(w=Param(float32[2]), rope=the same Node(dim=3))"
    assert text == f"List([\n  (0-2) {row}\n])"
    text = compact(Node(rope=shared, blocks=nnx.List(nodes(rope=shared))))
    assert "3 x Node(w=Param(float32[2]), rope=Node(...))" in text
    text = compact(nnx.List([shared] * 3))
    assert text == "List([\n  (0-2) 3 x the same Node(dim=3)\n])"


def test_a_sibling_that_is_also_elsewhere_stands_alone(compact):
    blocks = nodes(4)
    text = compact(Node(blocks=nnx.List(blocks), third=blocks[2]))
    for part in "(0-1) 2 x Node(", "(2) Node(", "(3) Node(", "third=Node(...)":
        assert part in text


def test_weights_tied_within_each_sibling_differ_from_tied_to_another(compact):
    def tied(weight):
        return Node(a=nnx.data([weight]), b=nnx.data([weight]))

    text = compact(nnx.List([tied(nnx.Param(jnp.ones(2))) for _ in range(2)]))
    assert "(0-1) 2 x Node(a=[Param(float32[2])], b=[Param(...)])" in text
    weight = nnx.Param(jnp.ones(2))
    text = compact(nnx.List([Node(a=weight), Node(a=weight)]))
    assert "(0-1) 2 x Node(a=the same Param(float32[2]))" in text
