"""What is set for a time: by a context, a decorator or a plain call, in one thread.

Those are the modes (contract of graphs, section 2), the placement of Variables at their
creation and the defaults of Variables (contract of Variables, sections 9 and 10), these
also by their names of earlier releases (12.5).
"""

import threading

import jax.numpy as jnp
import pytest

import graftree as nnx

# Of each how it is set, how it is read, and the default.
SETTINGS = {
    "graph mode": (nnx.set_graph_mode, nnx.set_graph_mode.current_value, True),
    "graph updates": (nnx.set_graph_updates, nnx.set_graph_updates.current_value, True),
    "placement": (nnx.use_eager_sharding, nnx.using_eager_sharding, True),
    "ref": (lambda x: nnx.var_defaults(ref=x), lambda: nnx.Param(1.0).ref, False),
    "hijax": (lambda x: nnx.var_defaults(hijax=x), lambda: nnx.Param(1.0).hijax, False),
    "older ref": (nnx.use_refs, nnx.using_refs, False),
    "older hijax": (nnx.use_hijax, nnx.using_hijax, False),
}
each_setting = pytest.mark.parametrize(
    ("setting", "current", "default"), SETTINGS.values(), ids=SETTINGS
)


def in_another_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


@each_setting
def test_a_context_restores_also_after_an_exception(setting, current, default):
    with pytest.raises(KeyError), setting(not default) as bound:
        assert bound is None and current() is not default
        raise KeyError
    assert current() is default


@each_setting
def test_contexts_nest_and_calls_last_until_their_end(setting, current, default):
    with setting(not default):
        with setting(default):
            assert current() is default
        assert current() is not default
        setting(default)
        assert current() is default
        with setting(not default):
            assert current() is not default
        assert current() is default
    assert current() is default
    with setting(default):
        setting(not default)
        assert current() is not default
    assert current() is default


@each_setting
def test_decorated_functions_run_under_the_value(setting, current, default):
    @setting(not default)
    def inside():
        """Returns what is in force."""
        return current()

    assert current() is default
    assert inside() is not default and current() is default
    assert (inside.__name__, inside.__doc__) == ("inside", "Returns what is in force.")


@each_setting
def test_other_threads_see_the_default(setting, current, default):
    seen = []
    with setting(not default):
        in_another_thread(lambda: seen.append(current()))
    assert seen == [default]


@each_setting
def test_a_plain_call_counts_at_once_in_this_thread_only(setting, current, default):
    seen = []
    in_another_thread(lambda: (setting(not default), seen.append(current())))
    assert seen == [not default] and current() is default


# --------------------------------------------------------------------- var_defaults


def test_defaults_are_a_frozen_mapping_and_set_by_keyword_only():
    defaults = nnx.var_defaults()
    assert dict(defaults) == {"hijax": False, "ref": False}
    assert list(defaults) == ["hijax", "ref"] and len(defaults) == 2
    assert (defaults.hijax, defaults.ref, defaults["ref"]) == (False, False, False)
    with pytest.raises((AttributeError, TypeError)):
        defaults.ref = True
    with pytest.raises(KeyError):
        defaults["other"]
    with pytest.raises(TypeError):
        nnx.var_defaults(True)


@pytest.mark.parametrize(("name", "other"), [("ref", "hijax"), ("hijax", "ref")])
def test_defaults_are_independent(name, other):
    with nnx.var_defaults(**{name: True}):
        assert dict(nnx.var_defaults()) == {name: True, other: False}
        with nnx.var_defaults(**{other: True}):
            assert dict(nnx.var_defaults()) == {"hijax": True, "ref": True}
            with nnx.var_defaults(**{name: False}):
                assert nnx.var_defaults()[other] is True
    assert dict(nnx.var_defaults()) == {"hijax": False, "ref": False}


def test_arguments_beat_defaults():
    with nnx.var_defaults(ref=True):
        assert nnx.Param(jnp.ones(2)).ref is True
        assert nnx.Param(jnp.ones(2), ref=False).ref is False
        with nnx.var_defaults(ref=False):
            assert nnx.Param(jnp.ones(2)).ref is False


@pytest.mark.parametrize(
    ("use", "using", "name"),
    [(nnx.use_refs, nnx.using_refs, "ref"), (nnx.use_hijax, nnx.using_hijax, "hijax")],
)
def test_older_names_set_the_same_defaults(use, using, name):
    with use(True):
        assert nnx.var_defaults()[name]
        assert getattr(nnx.Variable(jnp.ones(2)), name)
    assert not nnx.var_defaults()[name]
    with nnx.var_defaults(**{name: True}):
        assert using() is True
    assert use(True)(lambda: nnx.Variable(jnp.ones(2)))().get_metadata(name)
