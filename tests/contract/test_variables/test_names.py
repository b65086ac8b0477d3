"""Attributes of objects and metadata of Variables may have any name (issue 12, §14)."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import graftree as nnx
from graftree.core.objects import bookkeeping, classes, pytrees
from graftree.core.variables import variables

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
    *(pytrees.PytreeState, classes.Facts, bookkeeping.AttributeTable),
    *(bookkeeping, classes, pytrees, variables),
) | {
    # Those of earlier designs, and what one might think of next.
    *("stamp", "class_hooks", "check_owned", "check_writable", "_value", "_owner"),
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
    v = nnx.Param(jnp.ones(2), tag="x")
    v._raw_value = jnp.zeros(2)
    assert v[...].tolist() == [0.0, 0.0] and v._raw_value is v.get_raw_value()
    v._var_metadata["tag"] = "y"
    v._var_metadata.update(other=1)
    assert v.tag == "y" and dict(v._var_metadata) == v.get_metadata()
    del v._var_metadata["other"]
    assert not v.has_metadata("other")
    v._var_metadata = {**v._var_metadata, "tag": "z"}
    assert v.tag == "z" and len(v._var_metadata) == 4


def test_writes_to_older_slots_are_structure_where_they_are():
    m = nnx.Dict(v=nnx.Param(jnp.ones(2), tag="x"))
    seen = nnx.jit(lambda m: m["v"][...] * len(m["v"].tag))
    assert [seen(m).sum().item() for _ in range(3)] == [2.0] * 3
    m["v"]._var_metadata["tag"] = "long"
    m["v"]._raw_value = jnp.ones(3)
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
