"""Variables: metadata (contract, section 4)."""

import copy
import pickle

import jax
import jax.numpy as jnp
import pytest

import graftree as nnx


def tagged(**entries):
    return nnx.Param(jnp.ones(2), **{"tag": "x", **entries})


def test_get_metadata_gives_a_fresh_dict():
    variable = tagged()
    variable.get_metadata()["tag"] = "changed"
    assert variable.tag == "x"


def test_required_entries_can_be_left_out():
    assert tagged().get_metadata(exclude_required=True) == {"tag": "x"}
    assert len(tagged().get_metadata(exclude_required=False)) == 4


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
    assert variable.get_metadata() == {
        "other": 1,
        "hijax": False,
        "ref": False,
        "eager_sharding": True,
    }


def test_name_and_value_set_one_entry():
    variable = tagged()
    variable.set_metadata("tag", "y")
    variable.set_metadata("other", 1)
    assert variable.get_metadata(exclude_required=True) == {"tag": "y", "other": 1}


def test_keywords_update():
    variable = tagged()
    variable.set_metadata(tag="y", other=1)
    assert variable.get_metadata(exclude_required=True) == {"tag": "y", "other": 1}


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {}),
        (("tag",), {}),
        ((1, 2, 3), {}),
        (("a", 1), {"b": 2}),
        (({},), {"b": 2}),
    ],
)
def test_other_forms_are_type_errors(args, kwargs):
    with pytest.raises(TypeError):
        tagged().set_metadata(*args, **kwargs)


@pytest.mark.parametrize("key", ["hijax", "ref"])
@pytest.mark.parametrize("form", ["dict", "pair", "keyword"])
def test_storage_flags_can_not_change(key, form):
    calls = {
        "dict": lambda v: v.set_metadata({key: True}),
        "pair": lambda v: v.set_metadata(key, True),
        "keyword": lambda v: v.set_metadata(**{key: True}),
    }
    variable = tagged()
    with pytest.raises(ValueError, match=rf"{key}(.|\n)*False(.|\n)*True"):
        calls[form](variable)
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
@pytest.mark.parametrize("form", ["dict", "pair", "keyword"])
def test_old_names_are_stored_as_out_sharding(old, form):
    variable = tagged()
    with pytest.warns(DeprecationWarning, match=old):
        if form == "dict":
            variable.set_metadata({old: ("x",)})
        elif form == "pair":
            variable.set_metadata(old, ("x",))
        else:
            variable.set_metadata(**{old: ("x",)})
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


def test_sharding_names_reads_the_annotation_and_warns():
    variable = nnx.Param(jnp.ones(2), out_sharding=("x",), eager_sharding=False)
    with pytest.warns(DeprecationWarning):
        assert variable.sharding_names == ("x",)
    with pytest.warns(DeprecationWarning):
        assert tagged().sharding_names is None


def test_sharding_is_that_of_the_array():
    variable = nnx.Param(jnp.ones(2), out_sharding=("x",), eager_sharding=False)
    assert variable.sharding == variable[...].sharding


# ------------------------------------------------------------- nnx.set_metadata


def test_setting_metadata_of_a_node_is_all_or_nothing():
    with nnx.var_defaults(ref=True):
        second = nnx.Param(jnp.ones(2))
    node = nnx.Dict(a=nnx.Param(jnp.ones(2)), b=second)
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
    v = nnx.Param(jnp.ones(2), tag="x")
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
    m = nnx.Dict(p=nnx.Param(jnp.ones(2), tag="x"))
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
    v = nnx.Param(jnp.ones(2), tag="x")
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
