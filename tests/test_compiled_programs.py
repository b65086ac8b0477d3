"""No test depends on what another process is writing (issue 12)."""

import os
import warnings

import jax
import jax.numpy as jnp
import pytest
from jax._src import compiler

from tests import compiled_programs, sources
from tests.threads import run_in_threads


def test_programs_are_kept_in_a_folder_of_this_version_of_jax():
    def kept():
        folder = sources.ROOT / "out" / "jax-cache" / jax.__version__
        return list(folder.glob("jit_programs_are_kept-*"))

    for path in kept():
        path.unlink()
    jax.jit(programs_are_kept)(jnp.ones(3))
    assert kept()


def programs_are_kept(x):
    return x * 0.12345


@pytest.mark.skipif(not compiled_programs.memory(), reason="needs /proc")
def test_programs_are_forgotten_when_they_take_much_memory(monkeypatch):
    compiled = jax.jit(lambda x: x + 1)
    compiled(jnp.ones(3))
    assert compiled._cache_size() == 1
    monkeypatch.setattr(compiled_programs, "_bound", 0)
    compiled_programs.forget_those_of_a_file()
    assert compiled._cache_size() == 0


def test_entries_are_read_whole_while_another_writes_them(tmp_path):
    programs = compiled_programs.WholeFiles(tmp_path)
    entry = bytes(1_000_000)
    programs.put("key", entry)
    sizes = []

    run_in_threads(
        lambda: [programs.put("key", entry) for _ in range(50)],
        lambda: sizes.extend(len(programs.get("key")) for _ in range(200)),
    )
    assert set(sizes) == {len(entry)}
    assert os.listdir(tmp_path) == ["key"]


@pytest.mark.parametrize("verb", ["reading", "writing"])
def test_warnings_about_the_programs_fail_no_test(verb):
    warnings.warn(f"Error {verb} persistent compilation cache entry", stacklevel=1)


def test_programs_are_compiled_with_little_optimization():
    # pytest imports JAX before conftest.py sets the environment: it must be told.
    options = compiler.get_compile_options(num_replicas=1, num_partitions=1)
    chosen = options.executable_build_options.debug_options
    assert chosen.xla_backend_optimization_level == 0
