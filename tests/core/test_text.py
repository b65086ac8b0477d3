"""Objects as text: full or compact, folded, and as classes describe themselves."""

import dataclasses
import functools
import io
import re
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import tables, zoo

Attr, Object = nnx.reprlib.Attr, nnx.reprlib.Object
HINT = " # shortened; in full: print(nnx.debugging.full_repr(...))"


class Node(zoo.Box):
    """A Module with the attributes that it is given."""


def without_color(text):
    for code in nnx.reprlib.COLOR:
        text = text.replace(code, "")
    return text


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


@tables.cases(
    "wrapped",
    lambda x: nnx.List([x]),
    lambda x: nnx.Dict(a=x),
    lambda x: nnx.State({"a": nnx.Param(x)}),
    lambda x: nnx.to_flat_state(nnx.State({"a": x})),
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
    coloured = nnx.reprlib.get_repr(model, color=nnx.reprlib.COLOR)
    assert without_color(coloured) == repr(model) != coloured


# ---------------------------------------------------------------------- what it says


@tables.cases(
    "value, expected",
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
)
def test_values_are_short(compact, value, expected):
    assert compact(Node(x=nnx.data(value))).splitlines()[1] == f"  x={expected}"


def made():
    def inner(x):
        return x

    return inner


@tables.cases(
    "value, expected",
    (jax.nn.relu, "relu"),
    (jnp.tanh, "tanh"),
    (made(), "inner"),
    (jax.jit(made), "made"),
    (nnx.jit(made), "made"),
    (Node(a=1).__repr__, "Representable.__repr__"),
    (functools.partial(jax.nn.leaky_relu, 0.1, x=2), "partial(leaky_relu, 0.1, x=2)"),
    (lambda x: x, f"<lambda> (test_text.py:{made.__code__.co_firstlineno + 16})"),
)
@pytest.mark.parametrize("lines", [None, 0])
def test_functions_are_shown_by_name(lines, value, expected):
    with nnx.config.temp_flip_flag("graftree_repr_lines", lines):
        found = repr(Node(x=nnx.static(value))).partition("x=")[2]
    assert found.partition("\n)")[0] == expected


def test_attributes_at_their_defaults_are_left_out(compact):
    class Scaled(nnx.Linear):
        def __init__(self, *args, scale=2.0, **options):
            super().__init__(*args, **options)
            self.scale = scale

    rngs = nnx.Rngs(0)
    shown = "  kernel=Param(float32[2,3]),\n  bias=Param(float32[3]),\n"
    shown += "  in_features=2, out_features=3\n)"
    assert compact(Scaled(2, 3, rngs=rngs)).partition("\n")[2] == shown
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

    model = Node(w=nnx.Param(jnp.ones(2)))
    text = compact(nnx.Optimizer(model, optax.adam(1), wrt=nnx.Param))
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
    for name in ("layer_{}", "layer_{:02}"):
        rows = Node(**{name.format(i): node for i, node in enumerate(nodes(12))})
        places = f"{name.format(0)} to {name.format(11)}"
        assert f"\n  {places}=12 x Node(w=Param(float32[2]))\n" in compact(rows)
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


@dataclasses.dataclass
class Sizes:
    width: int
    depths: tuple[int, ...] = (1, 2)


def partial_of(x):
    def f():
        return x

    return f


@tables.cases(
    "first, second",
    (1, 1.0),
    (1, True),
    (jnp.ones(2), jnp.ones(3)),
    (jnp.ones(2), np.ones(2, np.float32)),
    (nnx.Param(1), nnx.Cache(1)),
    (nnx.Param(1), nnx.Param(1, tag="x")),
    ({"a": 1}, {"b": 1}),
    (partial_of(1), partial_of(2)),
    (Sizes(1), Sizes(2)),
    (bytearray(b"x"), bytearray(b"x")),
    (Node(_hidden=1), Node(_hidden=2)),
    (Node(a=1), Node(b=1)),
)
def test_siblings_that_differ_are_not_folded(compact, first, second):
    pair = [Node(x=nnx.data(value)) for value in (first, second)]
    text = compact(nnx.List(pair))
    assert text.count("Node(x=") == 2 and " x Node" not in text


@tables.cases(
    "make",
    lambda: float("nan"),
    lambda: partial_of([1, {"a": (2,)}]),
    lambda: jax.sharding.PartitionSpec("x", None),
    lambda: jnp.dtype("int8"),
    lambda: Sizes(3),
    lambda: functools.partial(partial_of(1), Sizes(2), axis=-1),
    lambda: Node(a=nnx.data({"b": nnx.Rngs(0)})),
    lambda: nnx.State({"a": {"b": jnp.ones(2)}}),
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


def test_values_with_one_label_and_other_parts_are_told_apart(compact):
    def layer(size):
        return Node(inner=Node(w=nnx.Param(jnp.ones(size))))

    text = compact(nnx.List([layer(2), layer(2), layer(3), layer(2)]))
    assert "(0-1) 2 x Node" in text and text.count("inner=Node") == 3


# ----------------------------------------------------- classes that describe themselves


class Shown(nnx.reprlib.Representable):
    """Shows the items it is given."""

    def __init__(self, *items):
        self.items = items

    def __nnx_repr__(self):
        yield from self.items


NESTED = Shown(Object("B"), Attr("b", [1]))


@tables.cases(
    "items, expected",
    ([Object("A")], "A()"),
    ([Object(int)], "int()"),
    ([Object("A", empty_repr="-")], "A(-)"),
    ([Object("A", comment=" # c"), Attr("k", 1)], "A( # c\n  k=1\n)"),
    ([Object("A"), Attr("k", "v"), Attr(3, None)], "A(\n  k='v',\n  3=None\n)"),
    ([Object("A"), Attr("k", "v", use_raw_value=True)], "A(\n  k=v\n)"),
    ([Object("A", same_line=True), Attr("a", 1), Attr("b", 2)], "A(a=1, b=2)"),
    ([Object("A", "<", ">", ": ", "   "), Attr("a", 1)], "A<\n   a: 1\n>"),
    ([Object("A"), Attr("a", 1, start="[", end="]")], "A(\n  [a=1]\n)"),
    ([Object("A"), Attr("a", NESTED)], "A(\n  a=B(\n    b=[1]\n  )\n)"),
)
def test_items_are_framed(items, expected):
    assert repr(Shown(*items)) == expected


@tables.cases(
    "items, phrase",
    ([Attr("a", 1)], "First item of Shown.__nnx_repr__ must be an Object, got Attr"),
    ([], "First item of Shown.__nnx_repr__ must be an Object, got NoneType"),
    ([Object("A"), 3], "Item of Shown.__nnx_repr__ must be an Attr, got int"),
)
def test_wrong_items_are_refused_and_leave_no_trace(items, phrase):
    for _ in range(2):
        with pytest.raises(TypeError, match=phrase):
            repr(Shown(Object("B"), Attr("b", Shown(*items))))
    assert repr(Node()) == "Node()"


@tables.cases(
    "value, expected",
    ((1,), "(1,)"),
    ([int, jnp.float32], "[int, float32]"),
    ({"a": {1: ()}}, "{'a': {1: ()}}"),
    (None, "None"),
    ("a\nb", r"'a\nb'"),
    (np.float32(1), "np.float32(1.0)"),
)
def test_values_are_written_as_by_python_and_classes_by_name(value, expected):
    assert without_color(nnx.reprlib.colorized(value)) == expected


def test_other_objects_end_only_at_cycles():
    inner = Shown(Object("B"))
    outer = Shown(Object("A"), Attr("x", inner), Attr("y", inner))
    assert repr(outer) == "A(\n  x=B(),\n  y=B()\n)"
    outer.items += (Attr("z", outer),)
    assert repr(outer).endswith("z=A(...)\n)")


def test_cycles_through_foreign_objects_end():
    class Foreign:
        def __repr__(self):
            return f"Foreign({self.node!r})"

    foreign = Foreign()
    foreign.node = Node(x=foreign)
    assert repr(foreign.node) == "Node(\n  x=Foreign(Node(...))\n)"


class Terminal(io.StringIO):
    def isatty(self):
        return True


@tables.cases(
    "stdout, variables, modules, is_coloured",
    (Terminal, {}, {}, True),
    (io.StringIO, {}, {}, False),
    (Terminal, {"NO_COLOR": "1"}, {}, False),
    (io.StringIO, {}, {"IPython": object}, True),
    ids=["a terminal", "a file", "NO_COLOR", "IPython"],
)
def test_only_str_is_coloured_where_colours_show(
    monkeypatch, stdout, variables, modules, is_coloured
):
    node = Node(a=nnx.Param(1), b=[None, True, 1.5, "x", {}])
    plain = repr(node)
    assert str(node) == plain
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for name, shell in modules.items():
        module = types.SimpleNamespace(get_ipython=shell)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(sys, "stdout", stdout())
    assert repr(node) == plain == without_color(str(node))
    assert (str(node) != plain) is is_coloured
    assert set(nnx.reprlib.NO_COLOR) == {""}


# ------------------------------------------------------------------------------- sizes


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
    (int8(1004), "1,004 (1.0 KB)"),
    (int8(1_000_004), "1,000,004 (1.0 MB)"),
    (int8(3 * 10**12), "3,000,000,000,000 (3,000.0 GB)"),
    (np.ones((2, 3), np.float32), "6 (24 B)"),
    ({"a": np.ones(2), "b": "x"}, "2 (16 B)"),
    (jnp.ones((0, 3)), ""),
    ((2, 3), ""),
    ids=repr,
)
def test_size_of_a_value(value, expected):
    assert first_line(nnx.Param(value)) == expected


def test_sizes_by_type_have_a_total_and_count_each_variable_once():
    shared = nnx.Param(jnp.ones(3))
    model = module(nnx.Module, a=nnx.BatchStat(jnp.ones(2)), b=nnx.Param(1))
    model.c, model.d = nnx.data([shared, {"x": shared}]), nnx.Param(np.ones(1))
    model.itself = model
    assert first_line(model) == "BatchStat: 2 (8 B), Param: 4 (20 B), Total: 6 (28 B)"
    assert first_line(module(nnx.Module, a=nnx.Param(1))) == ""


def test_sizes_of_parts_are_those_of_each_alone_also_of_what_they_share():
    shared = nnx.Param(jnp.ones(2))
    x, y = Node(w=shared), Node(w=shared, v=nnx.Param(jnp.ones(3)))
    text = nnx.debugging.full_repr(Node(x=x, y=y))
    sizes = re.findall(r"(\w*)=?Node\( # (.*)", text)
    whole, part = "Param: 5 (20 B)", "Param: 2 (8 B)"
    assert sizes == [("", whole), ("x", part), ("y", whole)]


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


ROWS = jnp.ones((2, 3))
EXPRESSIONS = {
    "array": lambda n: n.Param(ROWS, tag="x"),
    "none": lambda n: n.Param(None),
    "numpy": lambda n: n.Param(np.ones(3), a=None, out_sharding=None),
    "pytree": lambda n: n.Param({"a": jnp.ones(3), "b": [1, 2]}),
    "abstract": lambda n: n.Param(jax.ShapeDtypeStruct((2, 3), jnp.float32)),
    "nested": lambda n: n.Param(n.Param(1)),
    "ref": lambda n: n.Param(jnp.ones(3), ref=True),
    "metadata": lambda n: n.Param(1, f=len, t=(1, "a"), d={"a": 1}, c=int),
    "module": lambda n: module(
        n.Module, a=n.Param(ROWS), b=jnp.ones(()), _c=1, d=(int, jnp.float32)
    ),
    "module with arrays": lambda n: module(
        n.Module, a=np.ones(4), b=n.data({"c": ROWS, "d": n.Param(1)}), _e=jnp.ones(2)
    ),
    "cyclic": cyclic,
    "shapes": lambda n: jax.tree.map(jnp.shape, module(n.Module, b=n.Param(ROWS))),
    "state": lambda n: n.State({"a": n.Param(jnp.ones(3)), "b": {"c": 1, "d": {}}}),
    "module in state": lambda n: n.State({"m": module(n.Module, a=jnp.ones(3))}),
    "flat state": lambda n: n.FlatState([(("a",), n.Param(jnp.ones(3)))], sort=True),
}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_text_equals_that_of_the_peer(peer, name):
    expression = EXPRESSIONS[name]
    assert repr(expression(nnx)) == repr(expression(peer))
