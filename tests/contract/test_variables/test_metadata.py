"""Variables: metadata, hooks and those of axes (contract, sections 4 and 7)."""

import copy
import pickle

import jax
import jax.numpy as jnp
import pytest

import graftree as nnx

pytestmark = pytest.mark.filterwarnings("ignore:Hooks on Variables:UserWarning")


def tagged(**entries):
    return nnx.Param(jnp.ones(2), **{"tag": "x", **entries})


def test_get_metadata_gives_a_fresh_dict():
    variable = tagged()
    variable.get_metadata()["tag"] = "changed"
    assert variable.tag == "x"


def test_one_entry_can_be_read():
    variable = tagged()
    assert variable.get_metadata("tag") == "x"
    assert variable.get_metadata("other", 3) == 3
    assert variable.get_metadata("other", None) is None
    with pytest.raises(KeyError, match="other"):
        variable.get_metadata("other")


@pytest.mark.parametrize("exclude", [True, False])
def test_name_and_exclude_required_exclude_each_other(exclude):
    with pytest.raises(TypeError):
        tagged().get_metadata("tag", exclude_required=exclude)


def test_default_needs_a_name():
    with pytest.raises(TypeError):
        tagged().get_metadata(default=1)


# ------------------------------------------------------------------------- setting


def test_dict_replaces_all_but_the_required_entries():
    variable = tagged()
    variable.set_metadata({"other": 1})
    required = {"hijax": False, "ref": False, "eager_sharding": True}
    assert variable.get_metadata() == {"other": 1, **required}


def test_name_and_value_set_one_entry_and_keywords_several():
    pairs, keywords = tagged(), tagged()
    pairs.set_metadata("tag", "y")
    pairs.set_metadata("other", 1)
    keywords.set_metadata(tag="y", other=1)
    for variable in (pairs, keywords):
        assert variable.get_metadata(exclude_required=True) == {"tag": "y", "other": 1}


OTHER_FORMS = [((), {}), (("tag",), {}), ((1, 2, 3), {})]
OTHER_FORMS += [(("a", 1), {"b": 2}), (({},), {"b": 2})]


@pytest.mark.parametrize(("args", "kwargs"), OTHER_FORMS)
def test_other_forms_are_type_errors(args, kwargs):
    with pytest.raises(TypeError):
        tagged().set_metadata(*args, **kwargs)


FORMS = {
    "dict": lambda variable, key, value: variable.set_metadata({key: value}),
    "pair": lambda variable, key, value: variable.set_metadata(key, value),
    "keyword": lambda variable, key, value: variable.set_metadata(**{key: value}),
}


@pytest.mark.parametrize("key", ["hijax", "ref"])
@pytest.mark.parametrize("form", FORMS)
def test_storage_flags_can_not_change(key, form):
    variable = tagged()
    with pytest.raises(ValueError, match=rf"{key}(.|\n)*False(.|\n)*True"):
        FORMS[form](variable, key, True)
    assert variable.get_metadata("tag") == "x"


def test_eager_sharding_can_not_change_in_the_dict_form_only():
    variable = tagged()
    with pytest.raises(ValueError, match="eager_sharding"):
        variable.set_metadata({"eager_sharding": False})
    variable.set_metadata("eager_sharding", False)
    assert variable.get_metadata("eager_sharding") is False
    variable.set_metadata(eager_sharding=True)
    assert variable.get_metadata("eager_sharding") is True


@pytest.mark.parametrize("old", ["sharding", "sharding_names"])
@pytest.mark.parametrize("form", FORMS)
def test_old_names_are_stored_as_out_sharding(old, form):
    variable = tagged()
    with pytest.warns(DeprecationWarning, match=old):
        FORMS[form](variable, old, ("x",))
    assert variable.get_metadata("out_sharding") == ("x",)


def test_setting_out_sharding_does_not_move_data():
    variable = tagged()
    before = variable[...]
    variable.set_metadata(out_sharding=("x",))
    assert variable[...] is before and variable.out_sharding == ("x",)


def test_dict_of_the_caller_is_not_changed():
    given = {"sharding": ("x",)}
    with pytest.warns(DeprecationWarning):
        tagged().set_metadata(given)
    assert given == {"sharding": ("x",)}


# ------------------------------------------------------------------ asking, deleting


def test_entries_can_be_asked_for_and_deleted():
    variable = tagged()
    assert variable.has_metadata("tag") and not variable.has_metadata("other")
    variable.del_metadata("tag")
    assert not variable.has_metadata("tag")
    with pytest.raises(KeyError, match="tag"):
        variable.del_metadata("tag")


def test_sharding_names_reads_the_annotation_and_sharding_that_of_the_array():
    variable = tagged(out_sharding=("x",), eager_sharding=False)
    with pytest.warns(DeprecationWarning):
        assert variable.sharding_names == ("x",)
    with pytest.warns(DeprecationWarning):
        assert tagged().sharding_names is None
    assert variable.sharding == variable[...].sharding


# ------------------------------------------------------------- nnx.set_metadata


def test_setting_metadata_of_a_node_is_all_or_nothing():
    node = nnx.Dict(a=nnx.Param(jnp.ones(2)), b=nnx.Param(jnp.ones(2), ref=True))
    with pytest.raises(ValueError, match="Cannot change `ref` metadata"):
        nnx.set_metadata(node, ref=False, tag="x")
    assert not node.a.has_metadata("tag") and not node.b.has_metadata("tag")


# ------------------------------------------------------------ `_var_metadata`, a dict

ENTRY_WRITES = {
    "set": lambda m: m.__setitem__("new", 1),
    "replace": lambda m: m.__setitem__("tag", "y"),
    "del": lambda m: m.__delitem__("tag"),
    "update": lambda m: m.update(tag="y", new=1),
    "pop": lambda m: m.pop("tag"),
    "setdefault": lambda m: m.setdefault("new", 1),
}


@pytest.mark.parametrize("write", ENTRY_WRITES.values(), ids=ENTRY_WRITES)
def test_entries_can_be_written_inside_any_trace(write):
    v = tagged()
    expected = v.get_metadata()
    write(expected)
    jax.eval_shape(lambda x: (write(v._var_metadata), x)[1], 1.0)
    assert v.get_metadata() == expected == dict(v._var_metadata)


@pytest.mark.parametrize("write", ENTRY_WRITES.values(), ids=ENTRY_WRITES)
def test_what_was_learned_of_a_model_sees_entries_that_are_written(mode, write):
    def describe(m):
        seen.append(m.p.get_metadata())
        return m.p[...]

    seen = []
    m = nnx.Dict(p=tagged())
    call = nnx.jit(describe, **mode)
    for _ in range(3):
        call(m), nnx.split(m), nnx.state(m), nnx.clone(m)
    entries = m.p._var_metadata
    write(entries)
    call(m)
    expected = m.p.get_metadata()
    assert seen[-1] == expected
    for again in (nnx.clone(m), nnx.merge(*nnx.split(m)), nnx.state(m)):
        assert again["p"].get_metadata() == expected


def test_entries_do_what_a_dict_does():
    v = tagged()
    entries, expected = v._var_metadata, v.get_metadata()
    assert entries == expected and {**entries} == expected and repr(entries)
    assert entries | {"a": 1} == expected | {"a": 1}
    assert {"a": 1, "tag": 0} | entries == {"a": 1, "tag": 0} | expected
    for copied in (entries.copy(), copy.copy(entries), copy.deepcopy(entries)):
        assert type(copied) is dict and copied == expected
    assert pickle.loads(pickle.dumps(entries)) == expected
    v.set_metadata(tag="z")
    assert entries["tag"] == "z"


def test_all_entries_are_replaced_by_the_owner_only():
    v = nnx.Param(jnp.ones(2))
    v._var_metadata = {**v._var_metadata, "tag": "x"}
    assert v.tag == "x"
    with pytest.raises(nnx.errors.TraceContextError):
        jax.eval_shape(lambda x: (setattr(v, "_var_metadata", {}), x)[1], 1.0)


# --------------------------------------------------------------------------- hooks


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
def test_axis_methods_call_the_hooks_and_do_nothing_else(name):
    seen = []
    hook = {f"on_{name}": lambda variable, *args: seen.append((variable, *args))}
    variable = tagged(out_sharding=("x",), eager_sharding=False, **hook)
    getattr(variable, name)(1, "layers")
    assert seen[0][0] is variable and seen[0][1:] == (1, "layers")
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
