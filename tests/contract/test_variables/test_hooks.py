"""Variables: hooks and axis metadata (contract, section 7)."""

import jax
import jax.numpy as jnp
import pytest

import graftree as nnx

pytestmark = pytest.mark.filterwarnings("ignore:Hooks on Variables:UserWarning")


def add(amount):
    return lambda variable, value: value + amount


def times(factor):
    return lambda variable, value: value * factor


def test_hooks_are_deprecated():
    with pytest.warns(UserWarning, match="deprecated"):
        nnx.Param(1, on_get_value=add(1))


def test_get_hook_changes_what_is_read_only():
    variable = nnx.Param(jnp.array([1.0]), on_get_value=add(1))
    assert variable[0] == 2.0 and variable.get_value().tolist() == [2.0]
    assert variable.get_raw_value().tolist() == [1.0]


def test_set_hook_sees_what_is_written():
    variable = nnx.Param(jnp.zeros(2), on_set_value=times(2))
    variable[0] = 3.0
    assert variable[...].tolist() == [6.0, 0.0]
    variable.set_value(jnp.ones(2))
    assert variable[...].tolist() == [2.0, 2.0]


def test_create_hook_runs_once():
    variable = nnx.Param(1, on_create_value=add(1))
    variable.copy()
    jax.tree.map(lambda x: x, variable)
    assert variable.get_raw_value() == 2


@pytest.mark.parametrize("kind", [tuple, list])
def test_several_hooks_run_left_to_right(kind):
    variable = nnx.Param(1, on_get_value=kind([add(1), times(10)]))
    assert variable.get_value() == 20


def test_hooks_are_given_the_variable():
    seen = []
    variable = nnx.Param(1, on_get_value=lambda v, value: (seen.append(v), value)[1])
    variable.get_value()
    assert seen[0] is variable


def test_methods_of_a_subclass_are_hooks():
    class Doubled(nnx.Variable):
        def on_get_value(self, value):
            return 2 * value

        def on_set_value(self, value):
            return value + 1

    variable = Doubled(1)
    variable.set_value(4)
    assert variable.get_value() == 10


def test_keyword_beats_boxed_beats_class():
    class Hooked(nnx.Variable):
        def on_get_value(self, value):
            return "class"

    boxed = nnx.VariableMetadata(1, on_get_value=(lambda v, x: "boxed",))
    assert Hooked(1).get_value() == "class"
    assert Hooked(boxed).get_value() == "boxed"
    assert Hooked(boxed, on_get_value=lambda v, x: "keyword").get_value() == "keyword"


def test_hooks_stay_in_the_metadata_of_copies():
    variable = nnx.Param(1, on_get_value=add(1))
    assert variable.copy().get_value() == 2
    assert jax.tree.map(lambda x: x, variable).get_value() == 2
    assert "on_get_value" in repr(variable)


# ---------------------------------------------------------------------------- axes


@pytest.mark.parametrize("name", ["add_axis", "remove_axis"])
def test_axis_methods_call_the_hooks(name):
    seen = []
    hook = {f"on_{name}": lambda variable, *args: seen.append((variable, *args))}
    variable = nnx.Param(jnp.ones(2), **hook)
    getattr(variable, name)(1, "layers")
    assert seen[0][0] is variable and seen[0][1:] == (1, "layers")


@pytest.mark.parametrize("name", ["add_axis", "remove_axis"])
def test_axis_methods_do_nothing_else(name):
    entries = {"out_sharding": ("x",), "eager_sharding": False}
    variable = nnx.Param(jnp.ones(2), **entries)
    getattr(variable, name)(0, "layers")
    assert variable.out_sharding == ("x",)


def test_several_axis_hooks_all_get_index_and_name():
    seen = []
    hooks = [lambda v, index, name, i=i: seen.append((i, index, name)) for i in (0, 1)]
    nnx.Param(1, on_add_axis=tuple(hooks)).add_axis(2, "x")
    assert seen == [(0, 2, "x"), (1, 2, "x")]


def test_axis_methods_can_be_overridden():
    class Logged(nnx.Variable):
        def add_axis(self, axis_index, axis_name):
            seen.append(axis_name)
            super().add_axis(axis_index, axis_name)

    seen = []
    Logged(1, on_add_axis=lambda v, index, name: seen.append(index)).add_axis(3, "x")
    assert seen == ["x", 3]


# ------------------------------------------------------------------- with_metadata


def test_with_metadata_wraps_an_initializer():
    init = nnx.with_metadata(nnx.initializers.ones, tag="x", other=1)
    boxed = init(jax.random.key(0), (2,), jnp.float32)
    assert isinstance(boxed, nnx.VariableMetadata) and boxed.metadata["tag"] == "x"
    variable = nnx.Param(boxed)
    assert variable.get_metadata(exclude_required=True) == {"tag": "x", "other": 1}
    assert variable[...].tolist() == [1.0, 1.0]


def test_wrapped_initializer_takes_keywords():
    init = nnx.with_metadata(nnx.initializers.ones, tag="x")
    boxed = init(jax.random.key(0), shape=(3,), dtype=jnp.float32)
    assert boxed.raw_value.shape == (3,)


@pytest.mark.parametrize("form", ["one", "tuple", "list"])
def test_with_metadata_takes_one_hook_or_several(form):
    hooks = {"one": add(1), "tuple": (add(1),), "list": [add(1)]}[form]
    with pytest.warns(UserWarning, match="(?i)hooks"):
        init = nnx.with_metadata(lambda: 1, on_get_value=hooks)
    assert nnx.Param(init()).get_value() == 2


def test_boxed_value_has_the_fields_of_a_dataclass():
    boxed = nnx.VariableMetadata(1)
    assert (boxed.raw_value, boxed.metadata) == (1, {})
    for hook in ("get_value", "set_value", "create_value", "add_axis", "remove_axis"):
        assert getattr(boxed, f"on_{hook}") == ()
