"""Variables: how they are made, copied, replaced and printed.

Contract `variables-pytrees-modules`, sections 2 and 5.
"""

import copy
import pickle
import weakref

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from graftree import ids
from tests.zoo import Kind, Node


def boxed(value, **entries):
    return nnx.VariableMetadata(value, metadata=entries)


def tagged(value=None, **entries):
    value = jnp.ones(2) if value is None else value
    return nnx.Param(value, tag="x", **entries)


# ----------------------------------------------------------------------- signature


def test_the_value_is_required_and_positional_or_a_keyword():
    assert nnx.Variable(1).get_value() == 1
    assert nnx.Variable(value=2).get_value() == 2
    for args in ((), (1, 2)):
        with pytest.raises(TypeError):
            nnx.Variable(*args)


def test_variable_types_can_be_subscripted():
    assert type(nnx.Param[jax.Array](jnp.ones(2))) is nnx.Param
    assert nnx.Variable[int] is not None


VALUES = [
    *(jnp.ones(2), np.ones(2), 3, 2.5, None, "text", {"a": jnp.ones(2)}, [1, 2]),
    *((1, "x"), len, jax.ShapeDtypeStruct((2,), jnp.float32), nnx.Param(1)),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_any_value_is_stored_as_it_is(value):
    assert nnx.Variable(value).get_raw_value() is value


def test_buffers_and_dicts_of_the_caller_are_written_through():
    buffer, mapping = np.zeros(2), {"a": 1}
    nnx.Variable(buffer)[0] = 1.0
    nnx.Variable(mapping)["a"] = 2
    assert buffer.tolist() == [1.0, 0.0] and mapping == {"a": 2}


# ------------------------------------------------------------------------ metadata


def test_metadata_of_a_plain_variable_is_the_three_required_entries():
    plain = {"hijax": False, "ref": False, "eager_sharding": True}
    assert nnx.Param(jnp.ones(2)).get_metadata() == plain
    assert nnx.Variable.required_metadata == frozenset(plain)


def test_user_metadata_comes_before_the_required_entries():
    entries = nnx.Param(1, b=1, a=2).get_metadata()
    assert list(entries) == ["b", "a", "hijax", "ref", "eager_sharding"]


def test_hooks_of_the_class_come_last():
    class Doubled(nnx.Variable):
        def on_get_value(self, value):
            return 2 * value

    with pytest.warns(UserWarning, match="(?i)hooks"):
        variable = Doubled(3, tag="x")
    assert list(variable.get_metadata())[-1] == "on_get_value"
    assert variable.get_metadata("on_get_value") is Doubled.on_get_value


@pytest.mark.parametrize("old", ["sharding", "sharding_names"])
def test_old_metadata_names_become_out_sharding(old):
    with pytest.warns(DeprecationWarning, match=old):
        variable = nnx.Param(jnp.ones(2), eager_sharding=False, **{old: ("x",)})
    assert variable.get_metadata("out_sharding") == ("x",)
    assert not variable.has_metadata(old)


def test_boxed_metadata_wins_over_keywords():
    variable = nnx.Param(boxed(1, tag="boxed", b=2), tag="kw", a=1)
    entries = variable.get_metadata(exclude_required=True)
    assert entries == {"tag": "boxed", "a": 1, "b": 2}
    assert variable.get_raw_value() == 1


@pytest.mark.parametrize("key", ["hijax", "ref", "eager_sharding"])
def test_boxed_flags_are_taken(key):
    value = key != "eager_sharding"
    variable = nnx.Param(boxed(jnp.ones(2), **{key: value}))
    assert variable.get_metadata(key) is value


@pytest.mark.parametrize("key", ["hijax", "ref", "eager_sharding"])
def test_boxed_flag_that_contradicts_the_argument_is_named(key):
    with pytest.raises(ValueError, match=key):
        nnx.Param(boxed(jnp.ones(2), **{key: True}), **{key: False})


# ---------------------------------------------------------------- order of the steps


def test_create_hooks_run_before_create_value():
    class Traced(nnx.Variable):
        def create_value(self, value):
            return (*value, "create_value")

    with pytest.warns(UserWarning, match="(?i)hooks"):
        variable = Traced((), on_create_value=lambda variable, value: (*value, "hook"))
    assert variable.get_raw_value() == ("hook", "create_value")


def test_value_is_made_before_it_is_put_into_a_ref():
    class Halved(nnx.Variable):
        def create_value(self, value):
            return value / 2

    variable = Halved(jnp.array([2.0, 4.0]), ref=True)
    assert isinstance(variable.get_raw_value(), jax.Ref)
    assert variable[...].tolist() == [1.0, 2.0]


def test_shape_is_not_put_into_a_ref():
    shape = jax.ShapeDtypeStruct((2,), jnp.float32)
    assert nnx.Param(shape, ref=True).get_raw_value() is shape


# ------------------------------------------------------------------ object protocol


def test_instances_have_no_dict():
    assert not hasattr(nnx.Param(1), "__dict__")
    assert not hasattr(Kind(1), "__dict__")


def test_writing_and_deleting_attributes_is_refused_with_the_way_out():
    with pytest.raises(AttributeError, match=r"set_metadata\(tag="):
        nnx.Param(1).tag = "x"
    with pytest.raises(AttributeError, match="del_metadata"):
        del nnx.Param(1, tag="x").tag


def test_extras_of_a_subclass_go_through_super():
    class Scaled(nnx.Variable):
        def __init__(self, value, scale):
            super().__init__(value, scale=scale)

    assert Scaled(1, 3).scale == 3


def test_property_with_setter_works():
    class Boxed(nnx.Variable):
        @property
        def doubled(self):
            return 2 * self.get_value()

        @doubled.setter
        def doubled(self, value):
            self.set_value(value // 2)

    variable = Boxed(3)
    variable.doubled = 10
    assert (variable.doubled, variable.get_value()) == (10, 5)


def test_slots_of_a_subclass_are_not_part_of_the_pytree():
    class Slotted(nnx.Variable):
        __slots__ = ("extra",)

    variable = Slotted(1)
    variable.extra = "x"
    assert variable.extra == "x"
    assert not hasattr(jax.tree.map(lambda x: x, variable), "extra")
    assert not hasattr(variable.copy(), "extra")


def test_subclasses_are_pytrees_that_know_their_type():
    variable = Kind(jnp.array(3.0))
    assert type(variable) is variable.var_type is variable.type is Kind
    assert jax.tree.leaves(variable) == [3.0]


def test_variables_are_not_hashable_but_can_be_referred_to_weakly():
    variable = nnx.Param(1)
    with pytest.raises(TypeError):
        hash(variable)
    assert weakref.ref(variable)() is variable


# ---------------------------------------------------------------------------- copy


@pytest.mark.parametrize("name", ["copy", "replace", "to_state"])
def test_copy_shares_arrays_and_keeps_class_and_metadata(name):
    variable = tagged()
    other = getattr(variable, name)()
    assert type(other) is nnx.Param and other is not variable
    assert other[...] is variable[...]
    assert other.get_metadata() == variable.get_metadata()


def test_copy_takes_a_value_and_metadata():
    variable = tagged().replace(value=3, tag="y", other=1)
    assert variable.get_value() == 3
    assert variable.get_metadata(exclude_required=True) == {"tag": "y", "other": 1}
    assert tagged().replace(4).get_value() == 4


def test_containers_are_rebuilt():
    variable = nnx.Variable({"a": [1]})
    variable.copy().get_raw_value()["a"].append(2)
    assert variable.get_value() == {"a": [1]}


def test_raw_value_is_refused():
    with pytest.raises(TypeError, match="raw_value"):
        tagged().copy(raw_value=1)


def test_copy_runs_neither_hooks_nor_create_value_nor_placement():
    class Loud(nnx.Variable):
        def create_value(self, value):
            calls.append("create")
            return value

    calls = []
    variable = Loud(jnp.ones(2))
    variable.copy(out_sharding=("x",))
    variable.copy(on_create_value=lambda variable, value: calls.append("hook"))
    assert calls == ["create"]


def test_copy_belongs_to_the_trace_that_makes_it():
    variable = tagged()

    @jax.jit
    def f():
        other = variable.copy()
        other[...] += 1
        return other[...]

    assert f().tolist() == [2.0, 2.0] and variable[...].tolist() == [1.0, 1.0]


# ---------------------------------------------------------------------------- refs


def test_copy_of_a_ref_reads_it_into_a_new_one():
    variable = tagged(ref=True)
    other = variable.copy()
    other[...] += 1
    assert isinstance(other.get_raw_value(), jax.Ref)
    assert variable[...].tolist() == [1.0, 1.0] and other[...].tolist() == [2.0, 2.0]


def test_ref_can_be_shared_by_a_copy():
    variable = tagged(ref=True)
    assert variable.copy(_copy_ref=False).get_raw_value() is variable.get_raw_value()


def test_copy_converts_between_refs_and_arrays():
    plain = tagged(ref=True).copy(ref=False)
    assert isinstance(plain.get_raw_value(), jax.Array) and plain.ref is False
    backed = tagged().copy(ref=True)
    assert isinstance(backed.get_raw_value(), jax.Ref) and backed.ref is True


# ------------------------------------------------------------------- from_metadata


def test_from_metadata_runs_nothing():
    class Loud(nnx.Variable):
        def __init__(self, value):
            raise AssertionError("not called")

        def create_value(self, value):
            raise AssertionError("not called")

    entries = {"hijax": False, "ref": False, "tag": "x"}
    variable = Loud.from_metadata(3, entries)
    assert type(variable) is Loud and variable.get_value() == 3 and variable.tag == "x"


def test_from_metadata_needs_hijax():
    with pytest.raises(KeyError, match="hijax"):
        nnx.Param.from_metadata(3, {"ref": False})


# ------------------------------------------------------- copy_from, update_from_state


def test_copy_from_takes_value_and_metadata():
    variable, other = tagged(), nnx.Param(jnp.zeros(2), other=1)
    variable.copy_from(other)
    assert variable[...] is other[...]
    assert variable.get_metadata() == other.get_metadata()
    variable.copy_from(variable)
    assert variable[...] is other[...]


def test_copy_from_aliases_a_ref():
    variable, other = tagged(ref=True), tagged(ref=True)
    variable.copy_from(other)
    assert variable.get_raw_value() is other.get_raw_value()


def test_copy_from_another_class_is_refused():
    message = r"incompatible container(.|\n)*Param(.|\n)*BatchStat"
    with pytest.raises(ValueError, match=message):
        tagged().copy_from(nnx.BatchStat(1))


def test_update_from_state_takes_value_and_metadata_of_any_type():
    variable = tagged()
    variable.update_from_state(nnx.BatchStat(jnp.zeros(2), other=1))
    assert variable[...].tolist() == [0.0, 0.0] and type(variable) is nnx.Param
    assert variable.get_metadata(exclude_required=True) == {"other": 1}


def test_plain_variable_stays_plain_when_updated_from_a_ref():
    variable = tagged()
    variable.update_from_state(nnx.Param(jnp.zeros(2), ref=True))
    assert isinstance(variable.get_raw_value(), jax.Array) and variable.ref is False


# --------------------------------------------------------------------- copy module


def test_shallow_copy_shares_the_value_but_not_the_metadata():
    variable = tagged()
    other = copy.copy(variable)
    other.set_metadata(tag="y")
    assert type(other) is nnx.Param and other[...] is variable[...]
    assert variable.tag == "x"


@pytest.mark.parametrize(
    "value", [jnp.ones(2), np.ones(2), {"a": np.ones(2)}], ids=["jax", "numpy", "dict"]
)
def test_deep_copy_is_a_variable_with_a_value_of_its_own(value):
    variable = nnx.Param(value, tag=["x"])
    other = copy.deepcopy(variable)
    assert type(other) is nnx.Param and other.tag == ["x"]
    assert other.tag is not variable.tag
    (mine,), (theirs,) = jax.tree.leaves(value), jax.tree.leaves(other)
    assert mine is not theirs and (mine == theirs).all()


def test_deep_copy_keeps_sharing_with_enclosing_containers():
    variable = tagged()
    first, second = copy.deepcopy([variable, {"a": variable}])
    assert first is second["a"] and first is not variable


# ------------------------------------------------------------------------- pickling


@pytest.mark.parametrize("library", [pickle, cloudpickle])
def test_pickling_keeps_class_value_and_metadata(library):
    variable = tagged()
    other = library.loads(library.dumps(variable))
    assert type(other) is nnx.Param and other[...].tolist() == [1.0, 1.0]
    assert other.get_metadata() == variable.get_metadata()
    assert isinstance(other.get_raw_value(), jax.Array)


# ----------------------------------------------------------------------- how they print


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
    of_integers = np.zeros((2, 3), jax.dtypes.float0)  # a gradient without bytes
    assert "Param( # 6 (0 B)" in repr(nnx.Param(of_integers))


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
