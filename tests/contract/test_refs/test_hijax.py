"""Variables with ``hijax=True`` (section 12.4)."""

import copy
import itertools
import pickle

import jax
import jax.numpy as jnp
import pytest

import graftree as nnx
from tests.zoo import Kind

HijaxVariable = nnx.variablelib.HijaxVariable
ImmutableVariableError = nnx.errors.ImmutableVariableError
COMBINATIONS = [*itertools.product([False, True], repeat=2)]


def hi(value=None, **metadata):
    value = jnp.array([1.0, 2.0]) if value is None else value
    return nnx.Param(value, hijax=True, **metadata)


def increment(variable):
    variable[...] += 1


def test_it_is_a_hijax_variable_of_its_declared_type():
    variable = hi()
    assert isinstance(variable, HijaxVariable) and isinstance(variable, nnx.Param)
    assert not isinstance(variable, nnx.BatchStat)
    assert variable.hijax and variable.var_type is nnx.Param
    assert not isinstance(nnx.Param(1), HijaxVariable)
    assert not isinstance(jnp.ones(2), HijaxVariable)


def test_it_is_so_within_a_trace_too():
    seen = []

    def f(v):
        seen.extend(isinstance(v, kind) for kind in (HijaxVariable, nnx.Param))
        seen.extend([v.hijax, v.var_type, v.shape, v.tag, v.has_metadata("tag")])
        seen.extend([str(v), repr(v)])

    jax.jit(f)(hi(tag="x"))
    assert seen[:-2] == [True, True, True, nnx.Param, (2,), "x", True]
    assert all("Param" in text and "hijax=True" in text for text in seen[-2:])


def test_subclasses_and_defaults_are_hijax():
    with nnx.var_defaults(hijax=True):
        assert isinstance(Kind(jnp.ones(2)), HijaxVariable)
        assert not isinstance(Kind(jnp.ones(2), hijax=False), HijaxVariable)


@pytest.mark.parametrize(("hijax", "ref"), COMBINATIONS)
def test_all_combinations_are_made_and_reported(hijax, ref):
    entries = {"hijax": hijax, "ref": ref}
    for variable in (
        nnx.Param(jnp.ones(2), **entries),
        nnx.Param.from_metadata(jnp.ones(2), entries),
        nnx.Param(jnp.ones(2)).copy(**entries),
        nnx.Param(jnp.ones(2), hijax=not hijax, ref=not ref).copy(**entries),
        nnx.with_vars(nnx.Param(jnp.ones(2)), **entries),
        copy.deepcopy(nnx.Param(jnp.ones(2), **entries)),
        pickle.loads(pickle.dumps(nnx.Param(jnp.ones(2), **entries))),
    ):
        assert (variable.hijax, variable.ref, variable.has_ref) == (hijax, ref, ref)
        assert isinstance(variable, HijaxVariable) is hijax
        assert variable[...].tolist() == [1.0, 1.0]


def test_the_api_of_variables_works():
    variable = hi(tag="x")
    variable[...] += 1
    variable[0] = 0.0
    assert variable.get_value().tolist() == [0.0, 3.0]
    assert (variable * 2).tolist() == [0.0, 6.0] and variable.shape == (2,)
    variable.set_metadata(tag="y", other=1)
    variable.del_metadata("other")
    assert variable.tag == "y" and not variable.has_metadata("other")
    variable.update_from_state(nnx.Param(jnp.zeros(2)))
    assert variable.hijax and variable[...].tolist() == [0.0, 0.0]
    with pytest.raises(NotImplementedError, match="get_value"):
        variable.value


def test_values_may_be_pytrees():
    variable = hi((jnp.array(1.0), jnp.array(2.0)))
    assert variable[0] == 1.0
    assert jax.jit(lambda v: v[0] + v[1])(variable) == 3.0
    grads = jax.grad(lambda v: v[0] ** 2 + 3 * v[1])(hi((2.0, 1.0)))
    assert isinstance(grads, nnx.Param) and grads.get_value() == (4.0, 3.0)


# ------------------------------------------------------------------ inside transforms


LOST = {
    "jit": jax.jit(increment),
    "closure": lambda v: jax.jit(lambda: increment(v))(),
    "grad": lambda v: jax.grad(lambda v: increment(v) or v[...].sum())(v),
    "grad closure": lambda v: jax.grad(lambda x: increment(v) or x)(1.0),
    "scan": lambda v: jax.lax.scan(lambda c, _: increment(v) or (c, 0), 0, length=2),
    "carry": lambda v: jax.lax.scan(lambda v, _: increment(v) or (v, 0), v, length=2),
    "set": jax.jit(lambda v: v.set_value(0)),
    "metadata": jax.jit(lambda v: v.set_metadata(tag="x")),
    "update": jax.jit(lambda v: nnx.update(v, jnp.zeros(2))),
    "model": lambda v: jax.jit(lambda m: nnx.update(m, {"a": 0.0}))(nnx.Dict(a=v)),
}


@pytest.mark.parametrize("call", LOST.values(), ids=LOST)
def test_writes_that_would_be_lost_are_errors(call):
    variable = hi()
    with pytest.raises(ImmutableVariableError, match="ref=True"):
        call(variable)
    assert variable[...].tolist() == [1.0, 2.0]
    increment(variable)
    assert variable[...].tolist() == [2.0, 3.0]


@pytest.mark.parametrize("ref", [False, True])
def test_what_is_made_inside_is_written_inside(ref):
    def f(x):
        variable = nnx.Param(x, hijax=True, ref=ref)
        increment(variable)
        return variable[...]

    assert jax.jit(f)(1.0) == 2.0


def test_with_a_ref_or_by_lifted_jit_writes_propagate():
    in_ref, variable = hi(ref=True), hi()
    jax.jit(increment)(in_ref)
    jax.jit(lambda: increment(in_ref))()
    assert in_ref[...].tolist() == [3.0, 4.0]
    nnx.jit(increment)(variable)
    assert variable[...].tolist() == [2.0, 3.0] and variable.hijax


def test_it_is_returned_from_jit():
    made = jax.jit(lambda: hi(tag="x"))()
    same = jax.jit(lambda v: v)(made)
    for variable in (made, same):
        assert isinstance(variable, HijaxVariable) and variable.tag == "x"
        increment(variable)  # eager again
    assert made[...].tolist() == same[...].tolist() == [2.0, 3.0]


def test_aliases_are_allowed():
    variable = hi()
    model = nnx.Dict(a=variable, b=variable)
    total = jax.jit(lambda m, v: m.a[...] + m.b[...] + v[...])(model, variable)
    assert total.tolist() == [3.0, 6.0]


@pytest.mark.parametrize("grad", [jax.grad, nnx.grad])
def test_gradients_have_the_same_type(grad):
    grads = grad(lambda v: (v[...] ** 2).sum())(hi(tag="x"))
    assert isinstance(grads, HijaxVariable) and isinstance(grads, nnx.Param)
    assert grads[...].tolist() == [2.0, 4.0] and grads.tag == "x"


def test_it_may_be_captured_or_not_differentiated():
    variable = hi()
    assert jax.grad(lambda x: (x * variable[...]).sum())(1.0) == 3.0
    assert jax.grad(lambda x, v: (x * v[...]).sum())(1.0, variable) == 3.0


def test_it_is_mapped_and_scanned():
    assert jax.vmap(lambda v: v[...] * 2)(hi()).tolist() == [2.0, 4.0]
    total, _ = jax.lax.scan(lambda carry, v: (carry + v[...], None), 0.0, hi())
    assert total == 3.0


def test_models_of_hijax_variables_run():
    with nnx.var_defaults(hijax=True):
        model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    plain = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    x = jnp.ones((1, 2))
    assert isinstance(model.kernel, HijaxVariable)
    assert (jax.jit(lambda m: m(x))(model) == plain(x)).all()
