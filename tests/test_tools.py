"""The configuration; and what tests rest on: kept programs, shapes, `tests/stress`.

No test depends on what another process is writing (issue 12). The plugin finds
annotations that are not true, at run time.
"""

import json
import os
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import pytest
from jax._src import compiler
from jaxtyping import Array, Float

import graftree as nnx
from tests import compiled_programs, interpreters, shapes, sources, tables, threads
from tests.stress import shared_weights

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
        words = "y Yes t TRUE on 1 n No f FALSE oFf 0".split()
        for word, opposite in zip(words, reversed(words)):
            os.environ.update(NNX_GRAPH_MODE=word, NNX_GRAPH_UPDATES=opposite)
            read = importlib.reload(config)
            assert read.nnx_graph_updates is not read.nnx_graph_mode
            print(int(read.nnx_graph_mode), end="")
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


# -------------------------------------------------------------------------------- tools

# ------------------------------------------------------------------- compiled programs


def test_programs_are_kept_in_a_folder_of_this_version_of_jax():
    folder = sources.ROOT / "out" / "jax-cache" / jax.__version__
    for path in folder.glob("jit_programs_are_kept-*"):
        path.unlink()

    @jax.jit
    def programs_are_kept(x):
        return x * 0.12345

    programs_are_kept(jnp.ones(3))
    assert [*folder.glob("jit_programs_are_kept-*")]


@pytest.mark.skipif(not compiled_programs.memory(), reason="needs /proc")
def test_programs_are_forgotten_when_they_take_much_memory(monkeypatch):
    compiled = jax.jit(lambda x: x + 1)
    compiled(jnp.ones(3))
    assert compiled._cache_size() == 1
    monkeypatch.setattr(compiled_programs, "_bound", 0)
    compiled_programs.keep_within_bound()
    assert compiled._cache_size() == 0


def test_entries_are_read_whole_while_another_writes_them(tmp_path):
    programs = compiled_programs.WholeFiles(tmp_path)
    entry = bytes(1_000_000)
    programs.put("key", entry)
    sizes = []

    threads.run_in_threads(
        lambda: [programs.put("key", entry) for _ in range(50)],
        lambda: sizes.extend(len(programs.get("key")) for _ in range(200)),
    )
    assert set(sizes) == {len(entry)} and os.listdir(tmp_path) == ["key"]


@pytest.mark.parametrize("verb", ["reading", "writing"])
def test_warnings_about_the_programs_fail_no_test(verb):
    warnings.warn(f"Error {verb} persistent compilation cache entry", stacklevel=1)


def test_programs_are_compiled_with_little_optimization():
    # pytest imports JAX before conftest.py sets the environment: it must be told.
    options = compiler.get_compile_options(num_replicas=1, num_partitions=1)
    chosen = options.executable_build_options.debug_options
    assert chosen.xla_backend_optimization_level == 0


# ------------------------------------------------------------------ annotated shapes


@shapes.checked
def largest(
    x: Float[Array, "rows columns"], floor: Float[Array, " columns"] | None = None
) -> Float[Array, " columns"]:
    if x.size == 0:
        raise ValueError("nothing to compare")
    return x.max(axis=0) if floor is None else jnp.maximum(x, floor[None])


def test_true_annotations_change_nothing():
    assert largest(jnp.ones((2, 3))).shape == (3,)


@tables.cases(
    "name, arguments",
    ("x", [jnp.ones(3)]),
    ("x", [jnp.ones((2, 3), jnp.int32)]),
    ("floor", [jnp.ones((2, 3)), jnp.ones(1)]),
    ("return", [jnp.ones((2, 3)), jnp.ones(3)]),
)
def test_wrong_rank_dtype_or_size_fails_and_names_the_parameter(name, arguments):
    with pytest.raises(AssertionError, match=f"largest: `{name}` is (float|int)32"):
        largest(*arguments)


def test_error_of_the_function_itself_passes():
    with pytest.raises(ValueError, match="nothing to compare"):
        largest(jnp.ones((0, 3)))


def test_layers_and_functions_are_found():
    found = {f.__qualname__ for m in shapes.modules() for _, f in shapes.functions(m)}
    assert {"Linear.__call__", "dot_product_attention", "Average.update"} <= found


# ------------------------------------------------------------------------- tests/stress


def test_threads_that_call_new_functions_at_once_do_not_crash():
    # Issue 12, §7: the process died. So it is not the one that runs the tests.
    command = ["-m", "tests.stress.threads", "--rounds=1"]
    assert interpreters.printed(*command, PYTHONFAULTHANDLER="1").startswith("1 rounds")


@pytest.mark.long
def test_two_processes_load_and_save_weights():
    shared_weights.main([])


PLANTED = """
import dataclasses, pathlib, sys
from tests.stress import mutants, planting, recording

folder = pathlib.Path(sys.argv[1])
recording.KEPT = folder
killed = planting.chosen(0, 1, "src/graftree/core/paths.py")
same = dataclasses.replace(killed[0], end=killed[0].start, text="", key="same")
mutants.run([*killed, same], ["tests/core/test_patterns.py"], folder)
"""


@pytest.mark.long
@pytest.mark.skipif(sys.version_info < (3, 12), reason="needs sys.monitoring")
def test_planted_faults_are_seen_and_what_changes_nothing_survives(tmp_path):
    # A fork of the process that runs the tests would have its backend.
    interpreters.printed("-c", PLANTED, tmp_path)
    lines = (tmp_path / "faults.jsonl").read_text().splitlines()
    outcomes = {x["key"]: x["outcome"] for x in map(json.loads, lines)}
    assert outcomes.pop("same") == "survived" and [*outcomes.values()] == ["killed"]
