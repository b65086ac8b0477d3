"""Spellings of earlier releases (section 12.5, and 10 of the contract of Variables)."""

import jax
import jax.numpy as jnp
import pytest

import graftree as nnx
from tests.zoo import Box


def increment(variable):
    variable[...] += 1


def model():
    return Box(a=nnx.Param(jnp.array([1.0, 2.0]), tag="x"), array=jnp.ones(2), n=3)


# ---------------------------------------------------------------- flags of Variables


@pytest.mark.parametrize(
    ("older", "flags"),
    [
        ({"use_ref": True}, (False, True)),
        ({"has_ref": True}, (False, True)),
        ({"is_hijax": True}, (True, True)),
        ({"is_hijax": True, "ref": False}, (True, False)),
        ({"use_ref": False}, (False, False)),
    ],
    ids=str,
)
def test_older_flags_are_understood(older, flags):
    for variable in (
        nnx.Variable(jnp.ones(2), tag="x", **older),
        nnx.Variable(jnp.ones(2), tag="x").copy(**older),
    ):
        assert (variable.hijax, variable.ref) == flags and variable.tag == "x"
        assert variable.has_ref is flags[1] and variable.is_hijax is any(flags)
        names = {"tag", "hijax", "ref", "eager_sharding"}
        assert {*variable.get_metadata()} == names


def test_older_flags_win_over_defaults():
    with nnx.use_refs(True):
        assert not nnx.Variable(jnp.ones(2), use_ref=False).has_ref


@pytest.mark.parametrize("flag", ["use_ref", "is_hijax"])
def test_writes_under_plain_jit_propagate(flag):
    variable = nnx.Variable(jnp.array([1, 2, 3]), **{flag: True})
    jax.jit(increment)(variable)
    jax.jit(lambda: increment(variable))()
    assert variable[...].tolist() == [3, 4, 5]


# ---------------------------------------------------------------- to_refs, to_arrays


def test_to_refs_converts_variables_and_arrays():
    plain = model()
    refs = nnx.to_refs(plain)
    assert refs.a.ref and refs.a.tag == "x" and refs.n == 3
    assert isinstance(refs.array, jax.Ref) and refs.array[...].tolist() == [1.0, 1.0]
    assert not plain.a.ref and isinstance(plain.array, jax.Array)


def test_to_arrays_is_the_inverse():
    refs = nnx.to_refs(model())
    refs.a[...] += 1
    refs.array[...] = jnp.zeros(2)
    arrays = nnx.to_arrays(refs)
    refs.a[...] += 1
    assert not arrays.a.ref and arrays.a[...].tolist() == [2.0, 3.0]
    assert isinstance(arrays.array, jax.Array) and arrays.array.tolist() == [0.0, 0.0]
    assert jax.tree.structure(arrays) == jax.tree.structure(model())


def test_what_is_converted_already_keeps_its_identity():
    plain = model()
    refs = nnx.to_refs(plain)
    again, arrays = nnx.to_refs(refs), nnx.to_arrays(plain)
    assert again.a is refs.a and again.array is refs.array
    assert arrays.a is plain.a and arrays.array is plain.array


def test_only_filters_by_path_and_leaf():
    refs = nnx.to_refs([model(), model()], only=lambda path, x: path[0] == 0)
    assert refs[0].a.ref and isinstance(refs[0].array, jax.Ref)
    assert not refs[1].a.ref and isinstance(refs[1].array, jax.Array)
    assert not nnx.to_refs(model(), jax.Array).a.ref
    arrays = nnx.to_arrays(refs, only=nnx.Variable)
    assert not arrays[0].a.ref and isinstance(arrays[0].array, jax.Ref)


def test_bare_arrays_and_refs_are_converted():
    ref = nnx.to_refs(jnp.ones(2))
    assert isinstance(ref, jax.Ref)
    assert isinstance(nnx.to_arrays(ref), jax.Array)


@pytest.mark.parametrize("make", [lambda: jnp.ones(2), lambda: nnx.Param(jnp.ones(2))])
def test_shared_leaves_are_an_error(make):
    shared = make()
    with pytest.raises(ValueError, match=r"(?s)Found duplicate at path.*a.*b/0"):
        nnx.to_refs({"a": shared, "b": [shared]})
    shared = nnx.to_refs(make())
    with pytest.raises(ValueError, match=r"(?s)Found duplicate at path.*a.*b/0"):
        nnx.to_arrays({"a": shared, "b": [shared]})
    arrays = nnx.to_arrays({"a": shared, "b": [shared]}, allow_duplicates=True)
    assert arrays["a"] is arrays["b"][0]


def test_refs_are_frozen_inside_jit():
    params = nnx.state(nnx.to_refs(model()), nnx.Param)

    @jax.jit
    def gradient(params):
        grads = jax.grad(lambda p: (p.a[...] ** 2).sum())(nnx.to_arrays(params))
        return grads.a[...]

    assert gradient(params).tolist() == [2.0, 4.0]


# ------------------------------------------------------------------- the other names


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("as_ref_vars", {"ref": True}),
        ("as_array_vars", {"ref": False}),
        ("as_hijax_vars", {"hijax": True}),
        ("as_pytree_vars", {"hijax": False}),
        ("to_hijax", {"hijax": True}),
        ("to_lojax", {"hijax": False}),
    ],
)
def test_wrappers_of_with_vars(name, flags):
    opposite = {flag: not value for flag, value in flags.items()}
    given = nnx.with_vars(model(), **opposite)
    converted = getattr(nnx, name)(given, only=nnx.Param)
    assert flags.items() <= converted.a.get_metadata().items()
    tied = nnx.Dict(a=given.a, b=given.a)
    with pytest.raises(ValueError, match="Found duplicate"):
        getattr(nnx, name)(tied)
    converted = getattr(nnx, name)(tied, allow_duplicates=True)
    assert converted.a is converted.b


def test_read_only_and_back():
    frozen = nnx.as_immutable_vars(model())
    with pytest.raises(nnx.errors.ImmutableVariableError):
        increment(frozen.a)
    thawed = nnx.as_mutable_vars(frozen)
    increment(thawed.a)
    assert thawed.a[...].tolist() == [2.0, 3.0]


def test_names_of_refs():
    ref = nnx.array_ref(jnp.ones(2))
    assert isinstance(ref, nnx.ArrayRef) and nnx.ArrayRef is jax.Ref
    assert nnx.is_array_ref(ref) and not nnx.is_array_ref(ref[...])
    assert nnx.variablelib.is_array_ref is nnx.is_array_ref
    assert nnx.variablelib.Ref is jax.Ref


def test_pure_is_as_pure():
    with pytest.warns(DeprecationWarning, match="Use as_pure instead"):
        pure = nnx.pure(nnx.state(nnx.to_refs(model())))
    assert pure["a"].tolist() == [1.0, 2.0] and pure["array"].tolist() == [1.0, 1.0]


def test_all_names_are_reached_by_import():
    from graftree import as_ref_vars, pure, use_refs, vars_as

    assert as_ref_vars is nnx.as_ref_vars and use_refs is nnx.use_refs
    assert vars_as is nnx.vars_as and pure is nnx.pure
