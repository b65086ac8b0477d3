"""Attributes as data or static (contract, section 12), and their names."""

import dataclasses
import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from graftree.core.objects import attributes, bookkeeping, pytrees
from graftree.core.variables import variables
from tests.zoo import Node


def status(obj, name):
    return vars(obj)["_pytree__nodes"][name]


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Record:
    array: jax.Array


# -------------------------------------------------------------------------- is_data

ARRAY = jnp.ones(2)
DATA = [ARRAY, np.ones(2), jax.random.key(0), jax.new_ref(ARRAY)]
DATA += [nnx.Param(1), Node(), nnx.Object()]
NOT_DATA = [1, 1.5, True, np.float32(1), "x", None, len]
NOT_DATA += [jax.ShapeDtypeStruct((2,), jnp.float32), nnx.State({"a": ARRAY})]
NOT_DATA += [[ARRAY], {"a": ARRAY}, (ARRAY,), Record(ARRAY)]


def name_of(value):
    return type(value).__name__


@pytest.mark.parametrize("value", DATA, ids=name_of)
def test_data_is_recognized(value):
    assert nnx.is_data(value) is True
    assert status(Node(x=value), "x") is True


@pytest.mark.parametrize("value", NOT_DATA, ids=name_of)
def test_everything_else_is_not_data(value):
    assert nnx.is_data(value) is False


def test_tracers_are_data():
    def f(x, key):
        seen.append((nnx.is_data(x), nnx.is_data(key), status(Node(x=x), "x")))
        return x

    seen = []
    jax.jit(f)(1.0, jax.random.key(0))
    jax.grad(f)(1.0, jax.random.key(0))
    jax.vmap(f)(jnp.ones(2), jax.random.split(jax.random.key(0)))
    assert seen == [(True, True, True)] * 3


def test_object_made_inside_a_trace_holds_its_arrays_as_data():
    box = jax.jit(lambda x: Node(x=x, y=2))(1.0)
    assert isinstance(box.x, jax.Array) and status(box, "x") and box.y == 2
    shape = jax.eval_shape(lambda: Node(x=jnp.ones(3)))
    assert shape.x.shape == (3,)


def test_has_data_lists_what_it_finds():
    inner, array = Node(a=jnp.ones(2)), jnp.ones(2)
    found = nnx.has_data([1, {"a": inner}, (array, "x")])
    assert found[0] is inner and found[1] is array and len(found) == 2
    assert nnx.has_data("x") == [] and nnx.has_data([1, None]) == []


def test_registered_types_are_data_without_their_subclasses():
    @nnx.register_data_type
    @dataclasses.dataclass(frozen=True)
    class Reading:
        n: int

    class Derived(Reading):
        pass

    assert isinstance(Reading, type)
    assert nnx.is_data(Reading(1)) and not nnx.is_data(Derived(1))
    box = Node(x=Reading(1))
    assert jax.tree.leaves(box) == [Reading(1)]
    assert len(nnx.state(box)) == 1


# ------------------------------------------------------------------- explicit status


def test_data_and_static_are_unwrapped():
    box = Node(a=nnx.data("text"), b=nnx.static(3), c=nnx.data([jnp.ones(2)]))
    assert (box.a, box.b) == ("text", 3) and isinstance(box.c, list)
    assert [status(box, name) for name in "abc"] == [True, False, True]
    assert len(jax.tree.leaves(box)) == 2


def test_status_sticks_until_another_is_given():
    box = Node(x=jnp.ones(2), y=1, z=nnx.data(None))
    box.x, box.y, box.z = "text", 2, jnp.ones(2)
    assert [status(box, name) for name in "xyz"] == [True, False, True]
    box.x, box.y = nnx.static("text"), nnx.data(3)
    assert [status(box, name) for name in "xy"] == [False, True]


def test_deleting_forgets_the_status():
    box = Node(x=1)
    del box.x
    assert "x" not in vars(box)["_pytree__nodes"]
    box.x = jnp.ones(2)
    assert status(box, "x") is True


def test_plain_none_is_static_for_good_and_the_error_says_what_to_do():
    box = Node(x=None)
    with pytest.raises(ValueError, match=r"(?s)Cannot assign data value.*data\(None\)"):
        box.x = nnx.Param(1)
    assert box.x is None


def test_attributes_put_into_vars_get_their_status_in_the_end():
    class Direct(nnx.Pytree):
        def __init__(self):
            vars(self)["a"] = jnp.ones(2)
            vars(self)["b"] = 1

    direct = Direct()
    assert status(direct, "a") is True and status(direct, "b") is False


@pytest.mark.parametrize("array", [np.zeros(2), jnp.zeros(2)])
@pytest.mark.parametrize("make", [Node, nnx.Dict, lambda w: nnx.List([w])])
def test_an_array_in_the_place_of_a_variable_replaces_it_with_a_warning(make, array):
    variable = nnx.BatchStat(jnp.ones(2))
    obj = make(w=variable)
    name = "0" if isinstance(obj, nnx.List) else "w"
    with pytest.warns(nnx.errors.ReplacedVariableWarning) as caught:
        setattr(obj, name, array)
    assert vars(obj)[name] is array and variable[...].tolist() == [1.0, 1.0]
    assert [x.filename for x in caught] == [__file__]
    text = str(caught[0].message)
    assert f"{type(obj).__name__}.{name} was a BatchStat" in text
    assert all(x in text for x in (f"{name}[...] = x", "nnx.data(x)", "embed.attend"))


def test_arrays_that_are_meant_give_no_warning():
    class Net(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones(2))
            self.w = self.w[...]  # its own class decides

    net = Net()
    net.w = jnp.zeros(2)  # an array for an array
    net.w = nnx.Param(jnp.ones(2))
    net.w[...] = jnp.zeros(2)
    net.w = nnx.data(jnp.zeros(2))
    net.w = nnx.Param(jnp.ones(2))
    nnx.update(net, {"w": jnp.zeros(2)})
    del net.w
    net.w = jnp.zeros(2)


def test_class_attributes_are_no_part_of_the_tree():
    class Shared(nnx.Pytree):
        table = nnx.Param(jnp.ones(2))

    assert jax.tree.leaves(Shared()) == [] and len(nnx.state(Shared())) == 0


def test_opaque_objects_are_static():
    class Opaque:
        def __init__(self):
            self.array = jnp.ones(2)

    box = Node(a=Opaque(), b=functools.partial(jnp.add, jnp.ones(2)))
    assert status(box, "a") is False and status(box, "b") is False


# --------------------------------------------------------------------- class statuses


def declared(**attributes):
    return [status(Declared(**attributes), name) for name in ("a", "b", "c", "d")]


class Declared(Node):
    a: object = nnx.data()
    b: int = nnx.static()
    c: object = dataclasses.field(metadata={"static": False})
    d: int = dataclasses.field(metadata={"static": True})


def test_fields_declare_the_status():
    assert declared(a=1, b=2, c=[jnp.ones(2)], d=3) == [True, False, True, False]


@pytest.mark.parametrize(
    ("data", "static"),
    [(nnx.Data[list], nnx.Static[int]), ("nnx.Data[list]", "nnx.Static[int]")],
    ids=["types", "strings"],
)
def test_annotations_declare_the_status_and_warn(data, static):
    with pytest.warns(DeprecationWarning) as record:

        class Annotated(Node):
            a: data
            b: static

    assert len(record) == 2
    annotated = Annotated(a=[jnp.ones(2)], b=1)
    assert [status(annotated, name) for name in "ab"] == [True, False]


def test_subclasses_inherit_the_status_of_all_bases():
    class Left(nnx.Pytree):
        a: list = nnx.data()

    class Right(nnx.Pytree):
        b: list = nnx.data()

    class Mixin:
        c: list = nnx.data()

    class Both(Mixin, Left, Right, Node):
        pass

    assert len(jax.tree.leaves(Both(**{name: [jnp.ones(1)] for name in "abc"}))) == 3


def test_unassigned_field_is_a_missing_attribute_or_its_default():
    class Lazy(nnx.Pytree):
        x: list = nnx.data()
        y: int = nnx.static(default=3)

    with pytest.raises(AttributeError):
        Lazy().x
    assert not hasattr(Lazy(), "x") and Lazy().y == 3


def test_field_without_a_value_can_not_be_assigned():
    with pytest.raises(ValueError, match=r"nnx\.data"):
        Node(x=nnx.data())


@pytest.mark.parametrize("declare", [nnx.data, nnx.static])
def test_value_and_options_exclude_each_other(declare):
    for args, options in (((1,), {"default": 2}), ((1, 2), {}), ((), {"unknown": 1})):
        with pytest.raises(TypeError):
            declare(*args, **options)
    with pytest.raises(ValueError, match="static"):
        declare(metadata={"static": True})


def test_field_options_are_those_of_dataclasses():
    options = {"default": 1, "init": False, "repr": False, "kw_only": True}
    field = nnx.data(**options, metadata={"a": 1})
    assert isinstance(field, dataclasses.Field)
    assert {name: getattr(field, name) for name in options} == options
    assert dict(field.metadata) == {"a": 1, "static": False}


# ---------------------------------------------------------------------------- errors

CONTAINERS = {
    "list of arrays": [jnp.ones(2)],
    "list of Variables": [nnx.Param(1)],
    "dict of modules": {"a": nnx.Module()},
    "nested": (1, {"a": [np.ones(2)]}),
    "record": Record(jnp.ones(2)),
}
WAYS_OUT = r"(?s)'x'.*Node.*nnx\.data.*nnx\.List.*nnx\.Dict.*pytree=False"


def refused(phrase, call, ways_out=WAYS_OUT):
    with pytest.raises(ValueError, match=phrase) as error:
        call()
    assert ways_out is None or re.search(ways_out, str(error.value))


@pytest.mark.parametrize("name", CONTAINERS)
def test_container_with_data_in_a_new_or_static_attribute(name):
    value = CONTAINERS[name]
    refused("Found data on value of type", lambda: Node(x=value))
    box = Node(x=1)
    refused("Found data on value of type", lambda: setattr(box, "x", value))
    assert box.x == 1


def test_data_over_a_static_attribute():
    box = Node(x=1)
    refused("Cannot assign data value of type", lambda: setattr(box, "x", jnp.ones(2)))
    assert box.x == 1 and status(box, "x") is False


@pytest.mark.parametrize("value", [jnp.ones(2), nnx.Param(1), [nnx.Param(1)]])
def test_static_mark_on_data(value):
    refused("Found data in value of type", lambda: Node(x=nnx.static(value)))


def test_data_put_into_a_static_list_while_constructing():
    class Late(nnx.Pytree):
        def __init__(self):
            self.x = []
            self.x.append(jnp.ones(2))

    ways_out = WAYS_OUT.replace("Node", "Late")
    refused("Found unexpected data on value of type", Late, ways_out)


def test_data_put_into_a_static_list_later_is_found_by_check_pytree():
    box = Node(x=[])
    nnx.check_pytree(box)
    box.x.append(jnp.ones(2))
    refused("Found unexpected data on value of type", lambda: nnx.check_pytree(box))


def test_check_pytree_wants_a_pytree():
    with pytest.raises(TypeError):
        nnx.check_pytree([1])


def test_array_in_a_declared_static_field():
    @nnx.dataclass
    class Fielded(nnx.Pytree):
        x: int = nnx.static()

    phrase, later = "Found unexpected data on value of type", Declared()
    refused(phrase, lambda: Declared(b=ARRAY), None)
    refused(phrase, lambda: Fielded(ARRAY), None)
    refused("Found data on value of type", lambda: setattr(later, "b", ARRAY), None)
    assert not hasattr(later, "b")


@pytest.mark.parametrize("mark", [nnx.data, nnx.static])
def test_marks_inside_another_structure(mark):
    for value in ([mark(1)], {"a": (mark(1),)}, nnx.data([mark(1)])):
        refused("Found unexpected tags", lambda: Node(x=value), None)  # noqa: B023


def test_contradicting_declarations():
    phrase = r"Conflicting pytree annotation(.|\n)*Child\.a"
    with pytest.raises(ValueError, match=phrase):

        class Child(Declared):
            a: int = nnx.static()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match=r"Conflicting(.|\n)*Twice\.a"):

            class Twice(nnx.Pytree):
                a: nnx.Data[int] = nnx.static()


def test_static_metadata_that_is_no_bool():
    with pytest.raises(ValueError, match="Invalid 'static' metadata"):

        class Wrong(nnx.Pytree):
            a: int = dataclasses.field(metadata={"static": "yes"})


# -------------------------------------------------------------------------------- names

# What the contract makes public on objects and Variables, and what subclasses of
# Variables know of.
OF_OBJECTS = {
    *"_check_valid_context _object__nodes _object__state _pytree__nodes".split(),
    *"_pytree__state eval iter_children iter_modules perturb set_attributes".split(),
    *("sow", "train"),
}
OF_VARIABLES = {
    *"_check_valid_context _raw_value _trace_state _var_metadata add_axis copy".split(),
    *"copy_from create_value del_metadata from_metadata get_metadata".split(),
    *"get_raw_value get_value has_metadata has_ref hijax is_hijax raw_value".split(),
    *"ref remove_axis replace required_metadata set_metadata set_raw_value".split(),
    *"set_value shape sharding_names to_state type update_from_state value".split(),
    "var_type",
}


def names_in(*objects):
    """All names that these define or use, dunder names left out."""
    # Not those that `dir` shows: the others are what may collide.
    found = {
        name
        for x in objects
        for name in (type if isinstance(x, type) else object).__dir__(x)
        if isinstance(name, str)
    }
    found |= {name for x in objects for name in getattr(x, "__slots__", ())}
    # Of abc, of typing and of the machinery of classes.
    public = {name for name in found if not name.startswith(("__", "_abc_"))}
    return public - {"mro", "_is_protocol"}


OURS = names_in(
    *(nnx.Module, nnx.Object, nnx.List, nnx.Dict, nnx.Rngs, nnx.Linear),
    *(type(nnx.Module), type(nnx.Param), nnx.Param, nnx.Param(1)),
    *(pytrees.PytreeState, attributes.Facts, attributes.AttributeTable),
    *(bookkeeping, attributes, pytrees, variables),
) | {
    # Those of earlier designs, and what one might think of next.
    *("version", "class_hooks", "check_owned", "check_writable", "_value", "_owner"),
    *("_metadata", "attribute_key", "attribute_name", "attribute_sort_key"),
    *("data_descriptors", "declared_statuses", "empty_table", "is_module_class"),
    *("is_pytree_class", "find_data_descriptors"),
}
# Each is used at once with all others.
FREE_OF_OBJECTS = sorted(OURS - OF_OBJECTS)
# `sharding`, a module, is also an older name of `out_sharding`, and warns.
FREE_OF_VARIABLES = sorted(OURS - OF_VARIABLES - {"sharding"})


def test_public_names_are_those_of_the_contract():
    assert names_in(nnx.Pytree) | names_in(nnx.Module) == OF_OBJECTS
    assert names_in(nnx.Variable) == OF_VARIABLES == names_in(nnx.Param(1))
    linear = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    assert names_in(linear) - OF_OBJECTS == {*vars(linear)} - OF_OBJECTS


def check(x, names=FREE_OF_OBJECTS):
    assert {name: getattr(x, name) for name in names} == dict.fromkeys(names, "mine")


def use(m):
    """Takes an object through all that looks at its attributes."""
    call = nnx.jit(lambda m: m.w * 2)
    for _ in range(3):
        assert call(m).tolist() == [2.0, 2.0]
        check(nnx.merge(*nnx.split(m)))
    check(jax.tree.map(lambda x: x, m))
    check(nnx.clone(m))
    m.other = 1
    del m.other
    assert repr(m)
    check(m)


def make(body=None, base=nnx.Module):
    """A class in which all free names stand for the body."""

    def init(self):
        self.w = nnx.Param(jnp.ones(2))

    namespace = {} if body is None else dict.fromkeys(FREE_OF_OBJECTS, body)
    return type("Mine", (base,), {"__init__": init, **namespace})


@pytest.mark.parametrize("base", [nnx.Module, nnx.Object])
def test_attributes_may_have_any_name(base):
    m = make(base=base)()
    for name in FREE_OF_OBJECTS:
        setattr(m, name, "mine")
    if base is nnx.Module:
        use(m)
    check(nnx.merge(*nnx.split(m)))


def test_class_attributes_may_have_any_name():
    cls = make("mine")
    use(cls())
    assert names_in(cls) == OF_OBJECTS | {*FREE_OF_OBJECTS}


def test_methods_may_have_any_name():
    m = make(lambda self: self.w.shape)()
    nnx.split(m)
    results = nnx.jit(lambda m: [getattr(m, name)() for name in FREE_OF_OBJECTS])(m)
    assert results == [(2,)] * len(FREE_OF_OBJECTS)


def test_properties_may_have_any_name():
    def write(self, value):
        self.inner = value

    m = make(property(lambda self: self.inner, write))()
    for name in FREE_OF_OBJECTS:
        m.inner = None
        setattr(m, name, "mine")
        assert m.inner == "mine"
    use(m)


def test_dataclass_fields_may_have_any_name():
    fields = {name: nnx.static() for name in FREE_OF_OBJECTS}
    types = dict.fromkeys(fields, str) | {"w": object}
    namespace = {"__annotations__": types, **fields, "w": nnx.data()}
    cls = nnx.dataclass(type("Mine", (nnx.Pytree,), namespace))
    m = cls(**dict.fromkeys(fields, "mine"), w=nnx.Param(jnp.ones(2)))
    assert [field.name for field in dataclasses.fields(m)] == [*fields, "w"]
    use(m)


def test_metadata_may_have_any_name():
    v = nnx.Param(jnp.ones(2), **dict.fromkeys(FREE_OF_VARIABLES, "mine"))
    for name in FREE_OF_VARIABLES:
        v.set_metadata(name, "mine")
        assert v.get_metadata(name) == "mine"
    v[...] = jnp.zeros(2)
    m = nnx.merge(*nnx.split(nnx.Dict(v=v)))
    for variable in (v, m["v"], v.copy()):
        check(variable, FREE_OF_VARIABLES)


BODIES = {
    "class": "abc",
    "property": property(lambda self: self.get_raw_value()),
    "method": lambda self: 1,
}


@pytest.mark.parametrize("way", BODIES)
def test_names_in_subclasses_of_variables_are_free(way):
    cls = type("Mine", (nnx.Variable,), dict.fromkeys(FREE_OF_VARIABLES, BODIES[way]))
    v, f = cls(jnp.ones(2), tag="x"), nnx.jit(lambda v: v[...] + 1)
    for _ in range(3):
        assert f(v).tolist() == [2.0, 2.0]
    v[...] = jnp.zeros(2)
    v.set_metadata(tag="y")
    assert nnx.clone(v)[...].tolist() == [0.0, 0.0] and v.tag == "y"


# What real subclasses of Variables reach for.


def test_older_slots_can_be_read_and_written():
    m = nnx.Dict(v=nnx.Param(jnp.ones(2), tag="x"))
    seen = nnx.jit(lambda m: m["v"][...] * len(m["v"].tag))
    assert [seen(m).sum().item() for _ in range(3)] == [2.0] * 3
    m["v"]._var_metadata["tag"] = "long"
    m["v"]._raw_value = jnp.ones(3)
    assert m["v"]._raw_value is m["v"].get_raw_value()
    assert seen(m).tolist() == [4.0] * 3


def test_owner_can_be_set():
    v, here = nnx.Param(jnp.ones(())), nnx.tracers.TraceState()

    @jax.jit
    def steal(x):
        before, v._trace_state = v._trace_state._jax_trace, nnx.tracers.TraceState()
        v[...] = x
        v._raw_value = jnp.zeros(())
        v._trace_state._jax_trace = before

    steal(1.0)
    assert v._trace_state == here and v._trace_state.is_valid()
    v[...] = 2.0
    assert v[...] == 2.0


@pytest.mark.parametrize("make", [Node, nnx.Object])
def test_an_object_made_in_a_trace_can_be_given_to_the_trace_around_it(make):
    outer, objects = nnx.tracers.current_jax_trace(), []

    def infer():
        obj = make()
        # As Keras does it for a layer that is built while shapes are inferred.
        state = next(x for x in vars(obj).values() if hasattr(x, "_trace_state"))
        object.__setattr__(state._trace_state, "_jax_trace", outer)
        objects.append(obj)

    jax.eval_shape(infer)
    objects[0].name = "written"
    assert nnx.clone(objects[0], graph=True).name == "written"


def test_own_check_of_the_context_is_asked_before_each_write():
    asked = []

    class Checked(nnx.Variable):
        def _check_valid_context(self, error_msg):
            asked.append(error_msg())
            super()._check_valid_context(error_msg)

    v = Checked(jnp.ones(2))
    v[...] = 0.0
    v.set_value(jnp.ones(2))
    v.set_raw_value(jnp.ones(2))
    v.set_metadata(tag=1)
    assert len(asked) == 4 and "Cannot mutate Checked" in asked[0]
    with pytest.raises(nnx.errors.TraceContextError, match="Cannot mutate Checked"):
        jax.jit(lambda: v.set_value(1.0))()


def test_own_check_is_asked_where_many_are_written():
    locked = []

    class Checked(nnx.Variable):
        def _check_valid_context(self, error_msg):
            if locked:
                raise RuntimeError(error_msg())

    model = nnx.Dict(a=nnx.Param(jnp.zeros(2)), b=Checked(jnp.zeros(2)))

    @nnx.jit
    def step(model):
        model.a[...] += 1
        model.b[...] += 1

    for _ in range(3):
        step(model)
    locked.append(True)
    for write in (step, lambda m: nnx.update(m, {"a": jnp.ones(2), "b": jnp.ones(2)})):
        with pytest.raises(RuntimeError, match="Cannot mutate Checked"):
            write(model)
    assert [x[...].tolist() for x in model.values()] == [[3, 3], [3, 3]]


def test_a_class_has_an_empty_table_and_no_state():
    assert dict(nnx.Module._pytree__nodes) == {}
    assert not hasattr(nnx.Module, "_pytree__state")
