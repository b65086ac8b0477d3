"""The engine that writes objects as text."""

import io
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx

# Only there a test can say that no renderer is registered.
from graftree.core import hooks
from graftree.core.text import representations
from tests import tables, zoo

Attr, Object = nnx.reprlib.Attr, nnx.reprlib.Object


def without_color(text):
    for code in nnx.reprlib.COLOR:
        text = text.replace(code, "")
    return text


class Shown(nnx.reprlib.Representable):
    """Shows the items it is given."""

    def __init__(self, *items):
        self.items = items

    def __nnx_repr__(self):
        yield from self.items


NESTED = Shown(Object("B"), Attr("b", [1]))


def model(**attributes):
    result = nnx.Module()
    for name, value in attributes.items():
        setattr(result, name, value)
    return result


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
    assert repr(model()) == "Module()"


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


def test_cycles_through_foreign_containers_and_lists_end():
    class Foreign:
        def __repr__(self):
            return f"Foreign({self.node!r})"

    foreign = Foreign()
    foreign.node = model(x=foreign)
    assert repr(foreign.node) == "Module(\n  x=Foreign(Module(...))\n)"
    cyclic = [1]
    cyclic.append(cyclic)
    assert repr(nnx.reprlib.PrettySequence(cyclic)).count("[...]") == 1


@tables.cases(
    "depth, expected",
    (0, "Module(...)"),
    (1, "Module(\n  a=Module(...)\n)"),
    (None, "Module(\n  a=Module()\n)"),
)
def test_depth_is_limited_by_a_flag(depth, expected):
    with nnx.config.temp_flip_flag("flax_max_repr_depth", depth):
        assert repr(model(a=model())) == expected


def test_arrays_and_refs_in_variables_of_a_node_are_shortened_and_deleted_ones_shown():
    array = jnp.ones(3)
    short = "Array(shape=(3,), dtype=dtype('float32'))"
    assert short in repr(model(a=nnx.Param({"x": array})))
    assert "Array([1., 1., 1.]" in repr(nnx.reprlib.PrettyMapping({"x": array}))
    node = model(a=jax.new_ref(array), b=nnx.Param(array, ref=True))
    assert repr(node).count("=ArrayRef(shape=(3,), dtype=dtype('float32'))") == 2
    array.delete()
    assert "value=Array(shape=(3,)" in repr(nnx.Param(array))


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
    node = model(a=nnx.Param(1), b=[None, True, 1.5, "x", {}])
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


def test_renderers_are_registered(monkeypatch):
    node, hook = model(), hooks.treescope_repr
    monkeypatch.setattr(hook, "call", lambda *arguments: arguments)
    assert node.__treescope_repr__("path", 1) == (node, "path", 1)


@pytest.mark.parametrize("make", [zoo.Parts, zoo.Tied, lambda: [zoo.Tied()] * 2])
def test_sizes_of_all_objects_of_a_text_are_those_of_each_alone(make):
    root, sizes = make(), representations.Sizes()
    nodes = [x for _, x in nnx.iter_graph(root) if isinstance(x, nnx.Pytree)]
    for node in [root, *nodes, *nodes]:
        assert sorted(map(str, sizes.of(node))) == sorted(
            map(str, representations.Sizes().of(node))
        )
        boxes = representations.variables_in(node)
        assert sum(size.elements for _, size in sizes.of(node)) == sum(
            box.size for box in boxes
        )
