"""Printing, display, ids (contract, section 16)."""

import concurrent.futures
import copy
import itertools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from graftree import ids
from tests.zoo import Node


@pytest.fixture
def flag():
    """Sets a flag for one test."""
    before = {}

    def update(name, value):
        before.setdefault(name, getattr(nnx.config, name))
        nnx.config.update(name, value)

    yield update
    for name, value in before.items():
        nnx.config.update(name, value)


# ------------------------------------------------------------------------- Variables


def test_variable_shows_size_value_and_metadata():
    variable = nnx.Param(jnp.zeros((2, 3)), tag="x")
    assert repr(variable).startswith("Param( # 6 (24 B)\n  value=Array(")
    assert repr(variable).endswith(",\n  tag='x'\n)")


def test_size_is_left_out_for_values_without_arrays():
    assert repr(nnx.Variable("text")) == "Variable(\n  value='text'\n)"
    assert "#" not in repr(nnx.Param(jnp.zeros((0, 3))))


SIZES = [(1, "1 (4 B)"), (250, "250 (1,000 B)"), (500, "500 (2.0 KB)")]
SIZES += [(1_000, "1,000 (4.0 KB)"), (500_000, "500,000 (2.0 MB)")]


@pytest.mark.parametrize(("count", "size"), SIZES)
def test_sizes_have_units_of_powers_of_1000(count, size):
    variable = nnx.Param(np.zeros(count, np.float32))
    assert repr(variable).splitlines()[0] == f"Param( # {size}"


def test_sizes_of_containers_add_up():
    variable = nnx.Variable({"a": jnp.zeros(2), "b": [jnp.zeros(3)]})
    assert repr(variable).splitlines()[0] == "Variable( # 5 (20 B)"


def test_flags_are_shown_where_they_differ_from_the_default(flag):
    assert "ref=True" in repr(nnx.Param(jnp.zeros(2), ref=True))
    plain = nnx.Param(jnp.zeros(2))
    assert "hijax" not in repr(plain) and "ref" not in repr(plain)
    assert "eager_sharding" not in repr(plain)
    assert "eager_sharding=False" in repr(nnx.Param(1, eager_sharding=False))
    flag("flax_always_shard_variable", False)
    assert "eager_sharding=True" in repr(plain)


# --------------------------------------------------------------------------- Pytrees


def test_pytree_counts_its_variables_by_exact_type_and_adds_several_types_up():
    a, b, c = nnx.Param(np.zeros(2_000, "f")), nnx.BatchStat(jnp.zeros(4)), jnp.zeros(2)
    first = repr(Node(a=a, b=b, c=nnx.Param(c))).splitlines()[0]
    sizes = "Param: 2,002 (8.0 KB), BatchStat: 4 (16 B), Total: 2,006 (8.0 KB)"
    assert first == f"Node( # {sizes}"
    assert repr(Node(a=nnx.Param(jnp.zeros(2)))).startswith("Node( # Param: 2 (8 B)\n")
    assert repr(Node(a=1)) == "Node(\n  a=1\n)"
    assert repr(Node()) == "Node()"


def test_state_of_streams_is_counted_as_one_type():
    first = repr(nnx.Rngs(0)).splitlines()[0]
    assert first.startswith("Rngs( # RngState: 2 (") and "RngKey:" not in first


def test_attributes_come_in_order_of_insertion_without_private_statics():
    obj = Node(b=1, a="x", _hidden=3, _shown=nnx.data(4))
    assert repr(obj) == "Node(\n  b=1,\n  a='x',\n  _shown=4\n)"


def test_arrays_inside_pytrees_shrink():
    text = repr(Node(a=jnp.zeros((2, 3)), b=nnx.Param(jnp.zeros((2, 3)))))
    assert text.count("Array(shape=(2, 3), dtype=dtype('float32'))") == 2
    assert "Array(1., dtype=float32" in repr(Node(a=jnp.array(1.0)))
    assert "ArrayRef(shape=(2,)" in repr(Node(a=jax.new_ref(jnp.zeros(2))))


def test_second_occurrences_and_cycles_are_dots():
    leaf = Node(x=1)
    obj = Node(a=leaf, b=leaf)
    obj.me = obj
    text = repr(obj)
    assert text.count("x=1") == 1 and "b=Node(...)" in text and "me=Node(...)" in text


def test_containers_show_as_containers_and_their_arrays_in_full():
    assert repr(nnx.Dict(a=1, b="x")) == "Dict({\n  'a': 1,\n  'b': 'x'\n})"
    assert repr(nnx.List([1, "x"])) == "List([\n  1,\n  'x'\n])"
    assert repr(nnx.State({"a": 1})) == "State({\n  'a': 1\n})"
    assert repr(nnx.State({})) == "State({})"
    assert "Array([0., 0.], dtype=float32)" in repr(nnx.Dict(a=jnp.zeros(2)))
    assert "Array([0., 0.], dtype=float32)" in repr(nnx.List([jnp.zeros(2)]))


def test_trees_of_shapes_print():
    state = jax.tree.map(jnp.shape, nnx.state(nnx.Dict(a=nnx.Param(jnp.zeros((2, 3))))))
    assert "value=(2, 3)" in repr(state)


def test_depth_can_be_limited(flag):
    flag("flax_max_repr_depth", 1)
    text = repr(Node(a=Node(b=Node(c=1))))
    assert "..." in text and "c=1" not in text


# ------------------------------------------------------------------------- protocol


def test_classes_can_describe_themselves():
    class Own(nnx.reprlib.Representable):
        def __nnx_repr__(self):
            yield nnx.reprlib.Object("Own", start="<", end=">", kv_sep=": ")
            yield nnx.reprlib.Attr("a", 1)
            yield nnx.reprlib.Attr("b", "raw", use_raw_value=True)

    assert repr(Own()) == "Own<\n  a: 1,\n  b: raw\n>"


@pytest.mark.parametrize("items", [[1], ["object", 1]])
def test_wrong_items_are_type_errors(items):
    class Own(nnx.reprlib.Representable):
        def __nnx_repr__(self):
            if items[0] == "object":
                yield nnx.reprlib.Object("Own")
            yield items[-1]

    with pytest.raises(TypeError):
        repr(Own())


def test_text_is_not_coloured_off_a_terminal():
    obj = nnx.Dict(a=nnx.Param(jnp.zeros(2)))
    assert "\x1b" not in repr(obj) and "\x1b" not in str(obj)


@pytest.mark.parametrize("make", [lambda: nnx.Param(1), Node, lambda: nnx.State({})])
def test_treescope_can_render_the_objects(make):
    treescope = pytest.importorskip("treescope")
    obj = make()
    assert type(obj).__name__ in treescope.render_to_text(obj)


def test_import_does_not_need_treescope():
    program = "import sys; sys.modules['treescope'] = None; import graftree"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_display_prints_and_returns_none(capsys):
    assert nnx.display(Node(a=1), 3) is None
    printed = capsys.readouterr().out
    assert "Node(" in printed and "3" in printed


# ------------------------------------------------------------------------------ ids


def test_ids_are_unique_numbers():
    a, b = ids.uuid(), ids.uuid()
    assert a != b and a == a and hash(a) == hash(a) and len({a, b}) == 2
    number = int(repr(a).removeprefix("UUID(").removesuffix(")"))
    assert repr(b) == f"UUID({number + 1})"
    assert copy.copy(a) != a and copy.deepcopy(a) != a


def test_ids_are_unique_across_threads():
    def make(_):
        return [ids.uuid() for _ in range(200)]

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        made = itertools.chain(*threads.map(make, range(4)))
    assert len(set(made)) == 800
