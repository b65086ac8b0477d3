"""Variables: reading, writing, operators (contract, 3); writes past __setattr__."""

import collections
import copy
import functools
import inspect
import math
import operator
import pickle
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st

import graftree as nnx
from tests import tables


def array_variable():
    return nnx.Param(jnp.array([[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]))


# ------------------------------------------------------------------------- reading


def test_reading_a_whole_array_gives_the_stored_object():
    variable = nnx.Param(value := jnp.ones(2))
    assert variable[...] is variable.get_value() is value
    assert variable.get_value(index=...) is value


def test_reading_at_an_index_reads_the_array():
    variable = array_variable()
    assert variable[0, 1] == 1.0
    assert variable.get_value(index=(slice(None), 0)).tolist() == [0.0, 3.0]
    assert variable[np.array([1])].tolist() == [[3.0, 4.0, 5.0]]


def test_containers_are_rebuilt_and_leaves_kept():
    leaf = jnp.ones(2)
    stored = {"a": [leaf], "b": (leaf,)}
    read = nnx.Variable(stored).get_value()
    assert read == stored and read is not stored and read["a"] is not stored["a"]
    assert read["a"][0] is leaf


def test_dict_values_keep_their_order_and_may_have_keys_of_all_types():
    stored = {"b": 1, "a": 2, 3: 4}
    assert list(nnx.Variable(stored).get_value()) == ["b", "a", 3]


def test_module_as_a_value_is_not_copied_by_reading():
    inner = nnx.Dict(a=1)
    nnx.Variable(inner).get_value()["a"] = 2
    assert inner["a"] == 2


def test_dict_operations_work_on_the_variable():
    variable = nnx.Variable({"a": 1, "b": 2})
    variable["a"] = 3
    del variable["b"]
    variable["c"] = 4
    assert variable["a"] == 3 and len(variable) == 2 and "c" in variable
    assert list(variable) == ["a", "c"]


def test_list_operations_work_on_the_variable():
    variable = nnx.Variable([1, 2, 3])
    variable[0] = 10
    del variable[1]
    assert list(variable) == [10, 3] and variable[-1] == 3 and 3 in variable


SHAPE = jax.ShapeDtypeStruct((2,), jnp.float32)


def test_shape_values_can_be_read_whole():
    assert nnx.Param(SHAPE)[...] == SHAPE


# ------------------------------------------------------------------------- writing


def test_whole_write_of_the_same_type_rebinds():
    variable, new = nnx.Param(jnp.ones(2)), jnp.zeros(2)
    variable[...] = new
    assert variable[...] is new


def test_indexed_write_keeps_shape_and_dtype():
    variable = nnx.Param(jnp.zeros((2, 3)))
    variable[...] = 1
    variable[0, 1:] = np.array([5, 6])
    variable[1] = nnx.Param(jnp.full(3, 2.0))
    assert variable[...].tolist() == [[1.0, 5.0, 6.0], [2.0, 2.0, 2.0]]
    assert variable.dtype == jnp.float32


@pytest.mark.parametrize("make", [np.array, jnp.array, lambda x: (np.array(x),)])
def test_index_arrays_can_be_written(make):
    variable = nnx.Param(jnp.zeros(3))
    variable[make([0, 1])] = 1.0
    assert variable[...].tolist() == [1.0, 1.0, 0.0]


def test_write_of_a_wrong_shape_is_refused_by_jax():
    with pytest.raises(ValueError):
        nnx.Param(jnp.zeros(2))[...] = jnp.zeros(3)


def test_write_out_of_range_is_dropped():
    variable = nnx.Param(jnp.zeros(2))
    variable[5] = 1.0
    assert variable[...].tolist() == [0.0, 0.0]


def test_lossy_write_warns_and_casts():
    variable = nnx.Param(jnp.zeros(2, jnp.int32))
    with pytest.warns(FutureWarning):
        variable[...] = jnp.full(2, 1.5)
    assert variable[...].tolist() == [1, 1] and variable.dtype == jnp.int32


def test_set_value_replaces_shape_dtype_and_type():
    variable = nnx.Param(jnp.zeros(2))
    for value in (jnp.ones((3, 3), jnp.int32), "text", {"a": 1}):
        variable.set_value(value)
        assert variable.get_value() is value or variable.get_value() == value


def test_set_value_copies_containers_and_nests_variables():
    given, inner = [1], nnx.Param(1)
    variable = nnx.Variable(None)
    variable.set_value(given)
    given.append(2)
    assert variable.get_value() == [1]
    variable.set_value(inner)
    assert variable.get_raw_value() is inner


def test_set_value_at_an_index_equals_item_assignment():
    variable = array_variable()
    variable.set_value(9.0, index=(0, 0))
    assert variable[0, 0] == 9.0


def test_raw_values_pass_by_overridden_accessors():
    variable = Doubled(3)
    assert (variable.get_raw_value(), variable.get_value()) == (3, 6)
    variable.set_raw_value(4)
    assert variable.get_value() == 8


OLDER = {"value": "'.value' access is now deprec", "raw_value": ""}


@pytest.mark.parametrize("name", OLDER)
def test_older_properties_work_and_warn(name):
    variable = nnx.Variable(1)
    with pytest.warns(DeprecationWarning, match=OLDER[name]):
        assert getattr(variable, name) == 1
    with pytest.warns(DeprecationWarning, match=OLDER[name] and "'.value'"):
        setattr(variable, name, 2)
    assert variable.get_value() == variable.get_raw_value() == 2


@pytest.mark.parametrize(("value", "index"), [(object(), 0), (0, ...)])
def test_items_of_a_value_without_items_can_not_be_read(value, index):
    with pytest.raises(TypeError, match="not subscriptable"):
        nnx.Variable(value)[index]


@pytest.mark.parametrize(("value", "key"), [({}, "missing"), ({"a": 1}, ...)])
def test_items_that_a_dict_lacks_can_not_be_read(value, key):
    with pytest.raises(KeyError) as error:
        nnx.Variable(value)[key]
    assert error.value.args == (key,)


Pair = collections.namedtuple("Pair", ["x", "y"])


@pytest.mark.parametrize(
    "stored",
    [Pair([1], 2), collections.OrderedDict(b=[1], a=2), ({"a": [1]}, None)],
    ids=lambda stored: type(stored).__name__,
)
def test_containers_of_all_kinds_are_rebuilt(stored):
    read = nnx.Variable(stored).get_value()
    assert read == stored and type(read) is type(stored) and read is not stored
    inner, again = (
        [*(x.values() if isinstance(x, dict) else x)] for x in (stored, read)
    )
    assert inner[0] is not again[0] and again == inner


# ----------------------------------------------------------------------- overriding


class Doubled(nnx.Variable):
    def get_value(self, **kwargs):
        return 2 * super().get_value(**kwargs)

    def set_value(self, value, **kwargs):
        super().set_value(value // 2, **kwargs)


def test_everything_that_reads_goes_through_get_value():
    variable = Doubled(jnp.array([1.0, 2.0]))
    assert variable[0] == 2.0 and (variable + 1).tolist() == [3.0, 5.0]
    assert (1 - variable).tolist() == [-1, -3] and (-variable).tolist() == [-2, -4]
    assert jnp.sum(variable) == 6.0 and np.asarray(variable).tolist() == [2.0, 4.0]
    assert "[2., 4.]" in repr(variable)
    with pytest.warns(DeprecationWarning):
        assert variable.value.tolist() == [2.0, 4.0]


def test_everything_that_writes_goes_through_set_value():
    variable = Doubled(jnp.array([1.0, 2.0]))
    variable[0] = 10.0
    assert variable.get_raw_value().tolist() == [5.0, 2.0]
    with pytest.warns(DeprecationWarning):
        variable.value = jnp.array([8.0, 8.0])
    assert variable.get_raw_value().tolist() == [4.0, 4.0]


def test_flattening_and_states_read_the_raw_value():
    variable = Doubled(jnp.array(1.0))
    assert jax.tree.leaves(variable) == [1.0]
    assert nnx.state(nnx.Dict(a=variable))["a"].get_raw_value() == 1.0


# -------------------------------------------------------------------- proxy, calling


def test_unknown_attributes_are_those_of_the_metadata_then_of_the_raw_value():
    variable = nnx.Param(jnp.ones((2, 3)), tag="x", ndim="hidden")
    assert (variable.tag, variable.ndim) == ("x", "hidden")
    assert variable.T.shape == (3, 2) and variable.dtype == jnp.float32
    assert variable.at[0].set(2.0)[0, 0] == 2.0
    assert variable.astype(jnp.int32).dtype == jnp.int32


def test_class_attributes_win_over_metadata():
    variable = nnx.Param(jnp.ones((2, 3)), shape="x", type="y")
    assert variable.shape == (2, 3) and variable.type is nnx.Param


def test_methods_of_a_list_value_are_those_of_the_stored_list():
    variable = nnx.Variable([1])
    variable.append(2)
    assert variable.get_value() == [1, 2]


def test_missing_attribute_is_reported_for_the_type_of_the_value():
    with pytest.raises(AttributeError, match="'int' object"):
        nnx.Variable(1).missing


def test_calling_calls_the_value():
    assert nnx.Variable(lambda x, y: x - y)(5, y=3) == 2


# ------------------------------------------------------------------------ operators


def operators(names):
    return [getattr(operator, name) for name in names.split()]


BINARY = [divmod, *operators("add sub mul truediv floordiv mod pow eq ne lt le gt ge")]
OF_BITS = operators("lshift rshift and_ or_ xor")


def same(a, b):
    return jax.tree.all(jax.tree.map(np.array_equal, a, b))


@pytest.mark.parametrize("op", BINARY + OF_BITS, ids=lambda op: op.__name__)
def test_binary_operators_act_on_the_values(op):
    dtype = int if op in OF_BITS else float
    x, y = jnp.array([5, 3], dtype), jnp.array([2, 4], dtype)
    want, a, b = op(x, y), nnx.Param(x), nnx.Cache(y)
    for got in (op(a, y), op(x, b), op(a, b)):
        assert same(got, want) and not isinstance(got, nnx.Variable)


def test_matmul_acts_on_the_values():
    x, y = jnp.ones((2, 3)), jnp.ones((3, 4))
    assert (nnx.Param(x) @ y).shape == (x @ nnx.Param(y)).shape == (2, 4)
    assert (np.ones((2, 3), np.float32) @ nnx.Param(y)).shape == (2, 4)


@pytest.mark.parametrize("op", BINARY + OF_BITS, ids=lambda op: op.__name__)
def test_python_scalars_are_promoted_as_by_python(op):
    other = 2 if op in OF_BITS else 2.5
    assert op(nnx.Param(7), other) == op(7, other)
    assert op(other, nnx.Param(7)) == op(other, 7)


def test_unary_operators_act_on_the_value():
    variable = nnx.Param(jnp.array([-1.5, 2.0]))
    assert (-variable).tolist() == [1.5, -2.0] and (+variable).tolist() == [-1.5, 2.0]
    assert abs(variable).tolist() == [1.5, 2.0]
    assert (~nnx.Param(jnp.array(5))) == -6


def test_conversions_act_on_the_value():
    variable = nnx.Param(2.7)
    assert (int(variable), float(variable), complex(variable)) == (2, 2.7, 2.7 + 0j)
    rounded = [function(variable) for function in (math.trunc, math.floor, math.ceil)]
    assert rounded == [2, 2, 3]
    assert round(variable) == 3 and round(variable, 1) == 2.7
    assert [10, 20, 30][nnx.Param(jnp.array(1))] == 20


def test_truth_and_format_are_those_of_the_value():
    assert not nnx.Param(0) and nnx.Param(jnp.array(2.0))
    assert f"{nnx.Param(2.5):.2f}" == "2.50"


def test_truth_of_several_values_is_an_error_that_says_what_to_ask():
    def is_true(x):
        return bool(nnx.Param(x))

    for run in (is_true, jax.jit(is_true)):
        with pytest.raises((ValueError, TypeError)) as caught:
            run(jnp.zeros(2))
        assert "is not None" in caught.value.__notes__[-1]


def test_equality_of_arrays_is_elementwise_and_of_scalars_a_bool():
    assert (nnx.Param(jnp.array([1, 2])) == jnp.array([1, 3])).tolist() == [True, False]
    assert (nnx.Param(1) == 1) is True and (nnx.Param(1) != nnx.Param(1)) is False


IN_PLACE = operators(
    "iadd isub imul imatmul itruediv ifloordiv imod ipow ilshift irshift iand ixor ior"
)


@pytest.mark.parametrize("op", IN_PLACE, ids=lambda op: op.__name__)
def test_in_place_operators_are_refused_with_the_way_out(op):
    with pytest.raises(NotImplementedError, match=r"variable\[\.\.\.\] .*= x"):
        op(nnx.Param(jnp.ones(2)), 1)


def test_whole_write_makes_an_abstract_value_concrete():
    for new, expected in ((jnp.ones(2), [1.0, 1.0]), (3, [3.0, 3.0])):
        variable = nnx.Param(SHAPE)
        variable[...] = new
        assert variable.dtype == jnp.float32 and variable[...].tolist() == expected


@tables.cases(
    "index, value, error, phrase",
    (0, 1.0, TypeError, r"float32\[2\] is abstract"),
    (..., jnp.ones(3), ValueError, "broadcast"),
)
def test_what_does_not_fill_an_abstract_value_leaves_it(index, value, error, phrase):
    variable = nnx.Param(SHAPE)
    with pytest.raises(error, match=phrase):
        variable[index] = value
    assert variable[...] is SHAPE


# -------------------------------------------------------------- writes past __setattr__


class Plain(nnx.Module):
    """Written from outside, through `vars` and by setattr."""

    def __init__(self):
        self.p = nnx.Param(jnp.ones(()))
        self.k = 1

    @functools.cached_property
    def cached(self):
        return self.k + 1


class Overriding(Plain):
    """With a `__setattr__` and a `__delattr__` of its own that pass by ours."""

    def __setattr__(self, name, value):
        object.__setattr__(self, name, value)

    def __delattr__(self, name):
        object.__delattr__(self, name)


class Mixin:
    pass


class Mixed(Mixin, Plain):
    """`__dict__` is first found in a class that is not ours."""


WRITES = {
    "setattr": setattr,
    "vars": lambda m, name, value: vars(m).__setitem__(name, value),
    "update": lambda m, name, value: m.__dict__.update({name: value}),
    "union": lambda m, name, value: m.__dict__.__ior__({name: value}),
    "setdefault": lambda m, name, value: (
        vars(m).pop(name, None),
        vars(m).setdefault(name, value),
    ),
    "held": lambda m, name, value: m.held.__setitem__(name, value),
}
REMOVALS = {
    "delattr": delattr,
    "del": lambda m, name: vars(m).__delitem__(name),
    "pop": lambda m, name: vars(m).pop(name),
}


def value_of(name, number):
    return number if name.startswith("k") else nnx.Param(jnp.full((), float(number)))


def content(m):
    """The attributes, as plain numbers."""
    entries = {k: v for k, v in vars(m).items() if not k.startswith("_pytree__")}
    return {k: float(v[...] if hasattr(v, "shape") else v) for k, v in entries.items()}


@nnx.jit
def by_jit(m):
    return m.p[...], nnx.clone(m)


READS = {
    "jit": lambda m: by_jit(m)[1],
    "split": lambda m: nnx.merge(*nnx.split(m)),
    "state": lambda m: nnx.merge(nnx.graphdef(m), nnx.state(m)),
    "clone": nnx.clone,
    "tree map": lambda m: jax.tree.map(lambda x: x, m),
    "jax.jit": jax.jit(lambda m: m),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
}

NAMES = st.sampled_from(["p", "k", "k2", "p2", "p3"])
steps = st.one_of(
    st.tuples(st.sampled_from(sorted(WRITES)), NAMES, st.integers(0, 3)),
    st.tuples(st.sampled_from(sorted(REMOVALS)), st.sampled_from(["k2", "p2"])),
    st.tuples(st.just("read"), st.sampled_from(sorted(READS))),
)


@pytest.mark.parametrize("kind", [Plain, Overriding, Mixed])
@given(sequence=st.lists(steps, min_size=4, max_size=14), holds=st.booleans())
def test_reads_after_any_writes_see_what_is_there(kind, sequence, holds):
    m = kind()
    held: Any = vars(m) if holds else None
    for what, name, *rest in sequence:
        if what == "read":
            # Three times: what is known of an object is kept the second time.
            assert [content(READS[name](m)) for _ in range(3)] == [content(m)] * 3
        elif what in REMOVALS:
            if name in vars(m):
                REMOVALS[what](m, name)
        elif what == "held":
            (vars(m) if held is None else held)[name] = value_of(name, *rest)
        else:
            WRITES[what](m, name, value_of(name, *rest))
    for read in READS.values():
        assert content(read(m)) == content(m)


def known():
    """A Module that was split before."""
    m = Plain()
    for _ in range(3):
        nnx.split(m)
    return m


def test_state_after_two_splits_has_the_new_variable():
    m = known()
    vars(m)["p"] = nnx.Param(3.0)
    assert nnx.state(m)["p"].get_value() == 3.0


def test_cached_properties_are_seen():
    m, f = Plain(), nnx.jit(lambda m: sorted(set(vars(m)) & {"cached"}) and m.k)
    assert [f(m) for _ in range(3)] == [[]] * 3
    assert m.cached == 2 and f(m) == 1


def test_attribute_exchanged_for_another_in_vars_has_a_status():
    m = Plain()
    vars(m).pop("k")
    vars(m)["q"] = nnx.Param(jnp.ones(2))
    assert len(jax.tree.leaves(m)) == 2 and list(nnx.state(m)) == ["p", "q"]


def test_data_in_a_container_in_vars_is_refused_as_in_an_assignment():
    m = Plain()
    vars(m)["layers"] = [nnx.Param(jnp.ones(2))]
    with pytest.raises(ValueError, match=r"(?s)'layers' of Plain.*nnx.data"):
        jax.tree.leaves(m)


def test_another_dict_can_be_assigned():
    m, f = Plain(), nnx.jit(lambda m: m.p * m.k)
    assert [f(m).item() for _ in range(3)] == [1.0] * 3
    m.__dict__ = {**vars(m), "k": 7}
    assert [f(m).item() for _ in range(3)] == [7.0] * 3
    m.__dict__ = {"p": m.p, "k": 9}
    assert [f(m).item() for _ in range(3)] == [9.0] * 3


@runtime_checkable
class HasK(Protocol):
    k: int


def test_vars_are_what_python_and_jax_take_for_a_dict():
    m = known()
    assert isinstance(m, HasK) and inspect.getattr_static(m, "k") == 1
    assert type(copy.copy(vars(m))) is dict and type(vars(m).copy()) is dict
    assert set(pickle.loads(pickle.dumps(vars(m)))) == set(vars(m))
    assert isinstance(jax.tree.map(lambda x: x, vars(m))["p"], nnx.Param)


def test_touched_objects_are_looked_at_again():
    m, f = Plain(), nnx.jit(lambda m: m.p * m.k)
    assert [f(m).item() for _ in range(3)] == [1.0] * 3
    object.__setattr__(m, "k", 5)
    nnx.touch(m)
    nnx.touch(m.p)
    assert f(m) == 5.0
    with pytest.raises(TypeError, match="a Pytree or a Variable, got int"):
        nnx.touch(3)


def test_class_of_a_variable_may_be_set():
    m = known()
    m.p.__class__ = nnx.BatchStat
    assert list(nnx.state(m, nnx.BatchStat)) == ["p"] and not nnx.state(m, nnx.Param)


class Same(nnx.Variable):
    def __eq__(self, other):
        return True

    __hash__ = None


def test_variables_with_an_equality_of_their_own_are_told_apart():
    m = nnx.Dict(table=nnx.data({"a": Same(1.0), "b": nnx.Param(1.0)}))
    for _ in range(3):
        nnx.split(m)
    m.table["a"] = Same(2.0)
    assert nnx.state(m)["table"]["a"].get_value() == 2.0
