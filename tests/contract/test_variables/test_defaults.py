"""Defaults of Variables, and ref-backed Variables (contract, section 10)."""

import copy
import pickle
import threading

import jax
import jax.numpy as jnp
import pytest

import graftree as nnx


def backed(value=None):
    value = jnp.array([1.0, 2.0]) if value is None else value
    return nnx.Param(value, ref=True)


# --------------------------------------------------------------------- var_defaults


def test_defaults_are_a_frozen_mapping():
    defaults = nnx.var_defaults()
    assert dict(defaults) == {"hijax": False, "ref": False}
    assert list(defaults) == ["hijax", "ref"] and len(defaults) == 2
    assert (defaults.hijax, defaults.ref, defaults["ref"]) == (False, False, False)
    with pytest.raises((AttributeError, TypeError)):
        defaults.ref = True
    with pytest.raises(KeyError):
        defaults["other"]


def test_defaults_are_set_by_keyword_only():
    with pytest.raises(TypeError):
        nnx.var_defaults(True)


def test_context_sets_and_restores():
    with nnx.var_defaults(ref=True):
        assert nnx.var_defaults().ref is True and nnx.var_defaults().hijax is False
        assert nnx.Param(jnp.ones(2)).ref is True
        assert nnx.Param(jnp.ones(2), ref=False).ref is False
        with nnx.var_defaults(ref=False):
            assert nnx.Param(jnp.ones(2)).ref is False
        assert nnx.var_defaults().ref is True
    assert nnx.var_defaults().ref is False


def test_context_restores_after_an_exception():
    with pytest.raises(RuntimeError), nnx.var_defaults(ref=True):
        raise RuntimeError
    assert nnx.var_defaults().ref is False


def test_bare_call_inside_a_context_lasts_until_its_end():
    with nnx.var_defaults(ref=True):
        nnx.var_defaults(ref=False)
        assert nnx.var_defaults().ref is False
    assert nnx.var_defaults().ref is False
    with nnx.var_defaults(ref=False):
        nnx.var_defaults(ref=True)
        assert nnx.var_defaults().ref is True
    assert nnx.var_defaults().ref is False


def test_bare_call_takes_effect_at_once_in_this_thread_only():
    def elsewhere():
        nnx.var_defaults(ref=True)
        seen.append(nnx.Param(jnp.ones(2)).ref)

    seen = []
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [True] and nnx.var_defaults().ref is False


def test_decorator_holds_during_calls_only():
    @nnx.var_defaults(ref=True)
    def make():
        """Makes one."""
        return nnx.Param(jnp.ones(2))

    assert nnx.var_defaults().ref is False
    assert make().ref is True and nnx.var_defaults().ref is False
    assert (make.__name__, make.__doc__) == ("make", "Makes one.")


@pytest.mark.parametrize(("name", "other"), [("ref", "hijax"), ("hijax", "ref")])
def test_stacks_are_independent(name, other):
    with nnx.var_defaults(**{name: True}), nnx.var_defaults(**{other: True}):
        assert dict(nnx.var_defaults()) == {"hijax": True, "ref": True}
        with nnx.var_defaults(**{name: False}):
            assert nnx.var_defaults()[other] is True
    assert dict(nnx.var_defaults()) == {"hijax": False, "ref": False}


# -------------------------------------------------------------- ref-backed Variables


def test_raw_value_is_a_ref_of_the_array():
    variable = backed(jnp.array([1, 2]))
    assert isinstance(variable.get_raw_value(), jax.Ref) and variable.ref is True
    assert isinstance(variable[...], jax.Array) and variable[...].tolist() == [1, 2]
    assert jax.tree.leaves(variable)[0] is variable.get_raw_value()


@pytest.mark.parametrize("value", ["text", {"a": 1}])
def test_values_that_are_no_arrays_can_not_be_refs(value):
    with pytest.raises(TypeError):
        nnx.Param(value, ref=True)


def test_reading_gives_arrays():
    variable = backed()
    for read in (variable[...], variable.get_value(), variable[0], variable + 1):
        assert isinstance(read, jax.Array) and not isinstance(read, jax.Ref)
    assert jnp.sum(variable) == 3.0


def test_writing_goes_into_the_ref():
    variable = backed()
    ref = variable.get_raw_value()
    variable[...] = jnp.zeros(2)
    variable[1] = 5.0
    assert variable.get_raw_value() is ref and ref[...].tolist() == [0.0, 5.0]
    variable.set_value(jnp.ones(2))
    assert variable.get_raw_value() is ref and ref[...].tolist() == [1.0, 1.0]


def test_writing_another_shape_is_refused():
    variable = backed()
    with pytest.raises(ValueError):
        variable.set_value(jnp.zeros(3))
    assert variable[...].tolist() == [1.0, 2.0]


def test_attributes_are_those_of_the_array():
    variable = backed(jnp.ones((2, 3)))
    assert (variable.shape, variable.ndim, variable.dtype) == ((2, 3), 2, jnp.float32)
    assert variable.T.shape == (3, 2) and variable.sum() == 6.0
    assert variable.at[0].set(0.0).tolist() == [[0.0] * 3, [1.0] * 3]
    transposed = jax.jit(lambda v: (v.T, v.at[0].add(1.0), v.astype(int)))(variable)
    assert [x.shape for x in transposed] == [(3, 2), (2, 3), (2, 3)]


@pytest.mark.parametrize("form", ["argument", "closure"])
def test_writes_inside_jit_are_seen_outside(form):
    variable = backed()

    def increment(v):
        v[...] += 1

    if form == "argument":
        jax.jit(increment)(variable)
    else:
        jax.jit(lambda: increment(variable))()
    assert variable[...].tolist() == [2.0, 3.0]


def test_writes_inside_scan_are_seen_outside():
    variable = backed()

    def body(carry, x):
        variable[...] += x
        return carry, None

    jax.lax.scan(body, None, jnp.arange(3.0))
    assert variable[...].tolist() == [4.0, 5.0]


def test_writes_inside_grad_of_something_else_are_seen_outside():
    variable = backed(jnp.array(0.0))

    def loss(x):
        variable[...] += jax.lax.stop_gradient(x)
        return x**2

    assert jax.grad(loss)(3.0) == 6.0 and variable[...] == 3.0


def test_ref_made_inside_jit_can_not_leave_it():
    with pytest.raises(ValueError, match="mutable array reference"):
        jax.jit(lambda: backed())()


def test_same_ref_twice_is_refused_by_jax():
    variable = backed()
    with pytest.raises(ValueError, match="only one reference to a mutable array"):
        jax.jit(lambda a, b: None)(variable, variable)


def test_gradient_with_respect_to_a_ref_is_refused_by_jax():
    # Which of the two depends on the version of JAX.
    with pytest.raises((TypeError, ValueError)):
        jax.grad(lambda v: v[...].sum())(backed())


def test_eval_shape_takes_one():
    assert jax.eval_shape(lambda v: v[...] * 2, backed()).shape == (2,)


def test_split_and_merge_keep_the_ref():
    node = nnx.Dict(a=backed())
    merged = nnx.merge(*nnx.split(node))
    merged.a[...] += 1
    assert node.a[...].tolist() == [2.0, 3.0]


@pytest.mark.parametrize(
    "duplicate",
    [
        lambda v: v.copy(),
        copy.deepcopy,
        lambda v: pickle.loads(pickle.dumps(v)),
        lambda v: copy.deepcopy({"a": v})["a"],
        lambda v: copy.deepcopy(nnx.Dict(a=v)).a,
        lambda v: pickle.loads(pickle.dumps(nnx.Dict(a=v))).a,
    ],
    ids=["copy", "deepcopy", "pickle", "in a dict", "in a Dict", "pickled Dict"],
)
def test_duplicates_have_a_ref_of_their_own(duplicate):
    variable = backed()
    other = duplicate(variable)
    other[...] += 1
    assert isinstance(other.get_raw_value(), jax.Ref) and other.ref is True
    assert variable[...].tolist() == [1.0, 2.0] and other[...].tolist() == [2.0, 3.0]


def test_refs_are_told_from_arrays():
    is_array_ref = nnx.variablelib.is_array_ref
    ref = backed().get_raw_value()
    assert is_array_ref(ref) and not is_array_ref(ref[...]) and not is_array_ref(1)
    seen = []
    jax.jit(lambda r, x: seen.extend([is_array_ref(r), is_array_ref(x)]))(ref, 1.0)
    assert seen == [True, False]
