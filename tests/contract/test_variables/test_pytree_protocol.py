"""Variables as JAX pytrees; the registry of names (contract, section 8)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx


def tagged(value=1.0, **entries):
    return nnx.Param(jnp.array(value), **entries)


# -------------------------------------------------------------------------- pytree


def test_only_child_is_the_raw_value_under_value():
    flat, _ = jax.tree_util.tree_flatten_with_path(tagged())
    assert flat == [((jax.tree_util.GetAttrKey("value"),), 1.0)]
    node = nnx.Dict(kernel=tagged())
    path = jax.tree_util.tree_flatten_with_path(node)[0][0][0]
    assert jax.tree_util.keystr(path) == ".kernel.value"


def test_none_has_no_leaves_and_containers_have_theirs():
    assert jax.tree.leaves(nnx.Param(None)) == []
    assert jax.tree.leaves(nnx.Param({"b": 1, "a": 2})) == [2, 1]


def test_mapping_keeps_class_and_metadata():
    mapped = jax.tree.map(lambda x: x + 1, tagged(tag="x"))
    assert type(mapped) is nnx.Param and mapped[...] == 2.0 and mapped.tag == "x"


def test_order_of_metadata_does_not_matter():
    a, b = tagged(a=1, b=2), tagged(b=2, a=1)
    assert jax.tree.structure(a) == jax.tree.structure(b)
    assert hash(jax.tree.structure(a)) == hash(jax.tree.structure(b))


@pytest.mark.parametrize("other", [tagged(a=2), tagged(), nnx.Cache(1.0, a=1)])
def test_other_metadata_or_class_is_another_structure(other):
    variable = tagged(a=1)
    assert jax.tree.structure(variable) != jax.tree.structure(other)
    with pytest.raises(ValueError):
        jax.tree.map(lambda x, y: x, variable, other)


def test_unflattening_runs_nothing():
    class Loud(nnx.Variable):
        def __init__(self, value):
            calls.append("init")
            super().__init__(value)

        def create_value(self, value):
            calls.append("create")
            return value

    calls = []
    jax.tree.map(lambda x: x, Loud(1))
    assert calls == ["init", "create"]


def test_jitted_function_takes_and_returns_variables():
    @jax.jit
    def f(variable):
        traces.append(None)
        variable[...] += 1
        return variable

    traces = []
    variable = tagged(tag="x")
    out = f(f(variable))
    assert out[...] == 3.0 and out.tag == "x" and variable[...] == 1.0
    assert len(traces) == 1
    f(tagged(tag="y"))
    assert len(traces) == 2


def test_gradient_is_a_variable():
    grads = jax.grad(lambda v: v[...] ** 2)(tagged(3.0, tag="x"))
    assert type(grads) is nnx.Param and grads[...] == 6.0 and grads.tag == "x"


def test_vmap_and_scan_take_variables():
    def body(carry, v):
        carry[...] += v[...]
        return carry, None

    stacked = tagged([0.0, 1.0, 2.0])
    assert jax.vmap(lambda v: v[...] * 2)(stacked).tolist() == [0.0, 2.0, 4.0]
    assert jax.lax.scan(body, tagged(0.0), stacked)[0][...] == 3.0


@pytest.mark.parametrize("make", [np.array, jnp.array], ids=["numpy", "jax"])
def test_array_metadata_compares_by_content(make):
    a, b, c = (tagged(scale=make(x)) for x in ([1.0, 2.0], [1.0, 2.0], [1.0, 3.0]))
    assert jax.tree.structure(a) == jax.tree.structure(b)
    assert jax.tree.structure(a) != jax.tree.structure(c)
    assert jax.tree.map(jnp.add, a, b)[...] == 2.0


# -------------------------------------------------------------------------- types


def test_filters_match_subclasses():
    for kind in (nnx.Param, nnx.BatchStat, nnx.Cache, nnx.Intermediate):
        assert kind.__bases__[0].__name__ == "Variable"
    assert issubclass(nnx.Perturbation, nnx.Intermediate)
    kinds = {"a": nnx.Perturbation, "b": nnx.Intermediate, "c": nnx.Param}
    node = nnx.Dict({name: kind(1.0) for name, kind in kinds.items()})
    assert list(nnx.state(node, nnx.Intermediate)) == ["a", "b"]


# ------------------------------------------------------------------------ registry

NAMES = {
    "params": nnx.Param,
    "batch_stats": nnx.BatchStat,
    "cache": nnx.Cache,
    "intermediates": nnx.Intermediate,
    "perturbations": nnx.Perturbation,
}


@pytest.mark.parametrize("name", NAMES)
def test_names_of_the_library(name):
    assert nnx.variable_type_from_name(name) is NAMES[name]
    assert nnx.variable_name_from_type(NAMES[name]) == name


def test_unknown_name_says_how_to_register_and_can_be_registered_on_the_way():
    with pytest.raises(ValueError, match="register"):
        nnx.variable_type_from_name("unheard_of")
    made = nnx.variable_type_from_name("made_up", base=nnx.Param, allow_register=True)
    assert made.__name__ == "made_up" and made.__bases__ == (nnx.Param,)
    assert nnx.variable_type_from_name("made_up") is made
    assert jax.tree.leaves(made(1)) == [1]


def test_name_is_that_of_exactly_this_type():
    class Own(nnx.Param):
        pass

    with pytest.raises(ValueError, match="Own"):
        nnx.variable_name_from_type(Own)
    assert nnx.variable_name_from_type(Own, allow_register=True) == "Own"
    assert nnx.variable_type_from_name("Own") is Own


def test_class_name_that_is_taken_names_both_types():
    first, second = (type("Twice", (nnx.Variable,), {"n": n}) for n in (1, 2))
    nnx.variable_name_from_type(first, allow_register=True)
    with pytest.raises(ValueError, match=r"Twice(.|\n)*Twice"):
        nnx.variable_name_from_type(second, allow_register=True)


def test_registering_returns_the_type():
    class Kind(nnx.Variable):
        pass

    assert nnx.register_variable_name("kind_one", Kind) is Kind
    assert nnx.register_variable_name("kind_two")(Kind) is Kind
    assert nnx.variable_type_from_name("kind_two") is Kind
    assert nnx.variable_name_from_type(Kind) == "kind_one"


def test_taken_name_needs_overwrite():
    class Other(nnx.Variable):
        pass

    with pytest.raises(ValueError, match=r"Param(.|\n)*overwrite=True"):
        nnx.register_variable_name("params", Other)
    nnx.register_variable_name("scratch", Other)
    nnx.register_variable_name("scratch", nnx.Cache, overwrite=True)
    assert nnx.variable_type_from_name("scratch") is nnx.Cache
