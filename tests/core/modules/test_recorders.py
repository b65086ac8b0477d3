"""sow and perturb: into the buffers of a capture, or else into attributes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from graftree.core.modules import recorders


class Sow(nnx.Module):
    def __call__(self, x, name="y", kind=nnx.Intermediate, **options):
        return self.sow(kind, name, x, **options)


class Perturb(nnx.Module):
    def __call__(self, x, name="p", **options):
        return self.perturb(name, x, **options)


outside = pytest.mark.filterwarnings("ignore:Calling Module")


# ------------------------------------------------------------------ sow in a capture


def test_sow_appends_to_a_tuple():
    def twice(model):
        return model(1), model(2)

    results, seen = nnx.capture(twice, nnx.Intermediate)(Sow())
    assert results == (True, True)
    assert type(seen["y"]) is nnx.Intermediate
    assert seen["y"].get_value() == (1, 2)


def test_sow_reduces_with_the_functions_given():
    def largest(model):
        for x in (3, 1):
            model(x, reduce_fn=max, init_fn=lambda: 2)

    _, seen = nnx.capture(largest, nnx.Intermediate)(Sow())
    assert seen["y"].get_value() == 3


def test_sow_without_a_buffer_of_its_type_stores_nothing():
    model = Sow()
    result, seen = nnx.capture(model, nnx.Intermediate)(1, kind=nnx.BatchStat)
    assert result is False
    assert not seen and not hasattr(model, "y")


def test_sow_name_may_be_that_of_an_attribute():
    model = Sow()
    model.y = "attribute"
    _, seen = nnx.capture(model, nnx.Intermediate)(1)
    assert seen["y"].get_value() == (1,)
    assert model.y == "attribute"


def test_sow_types_have_registered_names():
    result, seen = nnx.capture(Sow(), nnx.Intermediate)(1, kind="intermediates")
    assert result is True and seen["y"].get_value() == (1,)


def test_capture_noop_does_not_matter_in_a_capture():
    _, seen = nnx.capture(Sow(), nnx.Intermediate)(1, capture_noop=True)
    assert seen["y"].get_value() == (1,)


# --------------------------------------------------------------- sow outside of one


def test_sow_outside_warns_and_sets_an_attribute():
    model = Sow()
    for x in (1, 2):
        with pytest.warns(DeprecationWarning, match="capture"):
            assert model(x) is True
    assert type(model.y) is nnx.Intermediate
    assert model.y.get_value() == (1, 2)


@outside
def test_sow_outside_makes_types_for_unknown_names():
    model = Sow()
    model(1, kind="sown_outside")
    assert type(model.y).__name__ == "sown_outside"
    assert nnx.variable_type_from_name("sown_outside") is type(model.y)


def test_sow_outside_refuses_an_attribute_that_is_no_variable():
    model = Sow()
    model.y = 3
    with pytest.raises(ValueError, match="Expected 'y' to be a Variable, got int"):
        model(1)


@pytest.mark.parametrize("kind", [nnx.Variable, nnx.Perturbation])
def test_sow_outside_refuses_a_variable_of_another_type(kind):
    model = Sow()
    model.y = nnx.Intermediate(())
    with pytest.raises(ValueError, match=f"to be of type '{kind.__name__}', got"):
        model(1, kind=kind)
    assert model.y.get_value() == ()


def test_noop_flag_switches_sow_outside_off():
    model = Sow()
    nnx.config.update("nnx_sow_capture_noop", True)
    try:
        assert model(1) is False
    finally:
        nnx.config.update("nnx_sow_capture_noop", False)
    assert model(1, capture_noop=True) is False
    assert not hasattr(model, "y")


@outside
def test_sow_into_an_outer_trace_raises():
    model = Sow()
    with pytest.raises(nnx.errors.TraceContextError):
        jax.jit(model.__call__)(1)
    model.y = nnx.Intermediate(())
    with pytest.raises(nnx.errors.TraceContextError):
        jax.jit(model.__call__)(1)
    assert model.y.get_value() == ()


@outside
def test_sow_outside_stores_plain_variables_also_with_refs_as_default():
    model = Sow()
    with nnx.var_defaults(ref=True):
        model(jnp.ones(2))
    np.testing.assert_array_equal(model.y.get_value()[0], [1, 1])


# ----------------------------------------------------------------------------- perturb


def test_perturb_records_zeros_of_the_shape_and_dtype():
    x = jnp.ones((2, 3), jnp.bfloat16)
    y, zeros = nnx.capture(Perturb(), nnx.Perturbation)(x)
    np.testing.assert_array_equal(y, x)
    assert zeros["p"].shape == (2, 3) and zeros["p"].dtype == jnp.bfloat16
    assert not zeros["p"][...].any()


def test_perturb_adds_what_the_buffer_holds():
    init = {"p": nnx.Perturbation(jnp.array(3.0))}
    assert nnx.capture(Perturb(), init=init)(1.0) == 4.0


def test_perturb_without_a_buffer_of_its_type_returns_the_value():
    value = object()
    result, _ = nnx.capture(Perturb(), nnx.Intermediate)(value)
    assert result is value


def test_perturb_adds_pytrees_leaf_by_leaf():
    value = {"a": jnp.ones(2), "b": (1.0,)}
    result, zeros = nnx.capture(Perturb(), nnx.Perturbation)(value)
    assert jax.tree.structure(result) == jax.tree.structure(value)
    assert not any(leaf.any() for leaf in jax.tree.leaves(zeros))


def test_perturb_takes_the_value_of_a_variable():
    result, zeros = nnx.capture(Perturb(), nnx.Perturbation)(nnx.Param(jnp.ones(2)))
    np.testing.assert_array_equal(result, [1, 1])
    np.testing.assert_array_equal(zeros["p"][...], [0, 0])


def test_perturb_of_another_type_goes_to_its_buffer():
    call = nnx.capture(Perturb(), nnx.Perturbation, nnx.Param)
    _, perturbations, params = call(1.0, variable_type="params")
    assert not perturbations and params["p"][...] == 0


def test_perturb_outside_warns_and_sets_an_attribute():
    model = Perturb()
    with pytest.warns(DeprecationWarning, match="capture"):
        assert model(1.0) == 1.0
    assert type(model.p) is nnx.Perturbation
    model.p.set_value(jnp.array(2.0))
    with pytest.warns(DeprecationWarning, match="capture"):
        assert model(1.0) == 3.0


@pytest.mark.parametrize("value", [3, nnx.Intermediate(1)])
def test_perturb_outside_refuses_attributes_of_other_types(value):
    model = Perturb()
    model.p = value
    with pytest.raises(ValueError, match="'p' to be of type 'Perturbation', got"):
        model(1.0)


def test_perturb_outside_may_be_switched_off():
    model = Perturb()
    assert model(1.0, capture_noop=True) == 1.0
    assert not hasattr(model, "p")


def test_default_reduction_is_public():
    assert recorders.tuple_reduce(recorders.tuple_init(), 1) == (1,)
