"""No test depends on what another process is writing (issue 12)."""

import os
import warnings

import jax
import jax.numpy as jnp
import pytest

from tests import compiled_programs
from tests.threads import run_in_threads


def test_programs_are_kept_in_the_folder_of_this_run():
    folder = os.environ["GRAFTREE_TESTS_PROGRAMS"]
    before = set(os.listdir(folder))
    jax.jit(lambda x: x * 0.12345 - os.getpid())(jnp.ones(3))
    assert set(os.listdir(folder)) - before


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
