"""Flags: their environment variables, `update`, and scoped defaults."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import graftree as nnx
from tests import threads

DEFAULTS = {
    "nnx_graph_mode": True,
    "nnx_graph_updates": True,
    "nnx_sow_capture_noop": False,
    "flax_always_shard_variable": True,
    "flax_hijax_variable": False,
    "flax_array_ref": False,
    "flax_pytree_module": True,
    "flax_max_repr_depth": None,
}


def test_flags_have_defaults():
    assert {name: getattr(nnx.config, name) for name in DEFAULTS} == DEFAULTS


def test_unknown_flags_are_refused():
    with pytest.raises(LookupError, match="(?s)unknown.*nnx_graph_mode"):
        nnx.config.update("unknown", 1)
    with pytest.raises(AttributeError, match="unknown"):
        nnx.config.unknown


def test_environment_is_read_at_import_and_what_is_wrong_in_it_is_named():
    # One process for all words: to start one takes a second.
    program = """if True:
        import importlib, os
        from graftree import config
        for word in "y Yes t TRUE on 1 n No f FALSE off 0".split():
            os.environ["NNX_GRAPH_MODE"] = word
            print(int(importlib.reload(config).nnx_graph_mode), end="")
        os.environ["FLAX_MAX_REPR_DEPTH"] = "3"
        print(importlib.reload(config).flax_max_repr_depth)
        for name, value in ("NNX_GRAPH_MODE", "maybe"), ("FLAX_MAX_REPR_DEPTH", "x"):
            os.environ[name] = value
            try:
                importlib.reload(config)
            except ValueError as error:
                print(str(error).splitlines()[-1])
            del os.environ[name]
    """
    clean = {k: v for k, v in os.environ.items() if k.lower() not in DEFAULTS}
    command = [sys.executable, "-c", program]
    printed = subprocess.run(command, env=clean, capture_output=True, text=True).stdout
    read, *refused = printed.splitlines()
    assert read == "1111110000003"
    assert "NNX_GRAPH_MODE" in refused[0] and "maybe" in refused[0]
    assert "FLAX_MAX_REPR_DEPTH" in refused[1] and "'x'" in refused[1]


# ------------------------------------------------------------------- scoped defaults

SCOPES = [nnx.set_graph_mode, nnx.set_graph_updates, nnx.use_eager_sharding]


# What else holds of scopes is in tests/contract: test_graph_state/test_update.py, and
# test_variables/test_eager_sharding.py.
@pytest.mark.parametrize("scope", SCOPES)
def test_failed_calls_of_a_decorated_function_leave_no_setting_behind(scope):
    @scope(False)
    def fail():
        assert scope.current_value() is False
        scope(True)
        raise KeyError

    for value in (True, False):
        with scope(value):
            with pytest.raises(KeyError):
                fail()
            assert scope.current_value() is value
    assert scope.current_value() is True


def test_the_stack_holds_what_is_set_above_the_flag():
    with nnx.set_graph_mode(False), nnx.set_graph_mode(True):
        assert nnx.set_graph_mode.get_stack() == [False, True]
        assert nnx.set_graph_mode.get_default() is True


SETTERS = {
    "for this thread": lambda scope, value: scope(value),
    "for all": lambda scope, value: nnx.config.temp_flip_flag(scope.flag, value),
}


@pytest.mark.parametrize("compile", [jax.jit, nnx.jit])
@pytest.mark.parametrize("set_to", SETTERS.values(), ids=SETTERS)
@pytest.mark.parametrize("scope", SCOPES)
def test_a_compiled_function_follows_what_is_in_force(scope, set_to, compile):
    """A program that was traced under another value is not used."""
    f = compile(lambda: jnp.array(scope.current_value()))
    for value in (True, False, True):
        with set_to(scope, value):
            assert f() == value
    assert f() == scope.current_value()


def test_a_compiled_function_follows_the_scopes_of_its_thread():
    f = jax.jit(lambda: jnp.array(nnx.set_graph_mode.current_value()))
    seen = []
    with nnx.set_graph_mode(False):
        assert not f()
        threads.run_in_threads(lambda: seen.append(bool(f())))
    assert seen == [True]


def test_how_texts_look_does_not_make_programs_anew():
    traces = []
    f = jax.jit(lambda: traces.append(0))
    f()
    with nnx.config.temp_flip_flag("max_repr_depth", 2):
        f()
    assert len(traces) == 1
