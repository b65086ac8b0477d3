"""Programs as they were written for Flax 0.8 to 0.12 run unchanged.

A program of ``corpus`` imports only Flax, JAX and Optax, and prints what it finds.
Lines that use a deprecated spelling end in ``# deprecated``; no other line may warn.
What today's Flax has no longer says so in its docstring.
"""

import json
import os
import pathlib
import subprocess
import sys

import pytest

FOLDER = pathlib.Path(__file__).parent / "corpus"
PROGRAMS = {
    f"{path.parent.name}/{path.stem}": path for path in sorted(FOLDER.glob("v*/*.py"))
}
GONE = {name for name, path in PROGRAMS.items() if "Not in Flax" in path.read_text()}


def outcomes(which, names):
    """What programs did, all in one process; quick to compile."""
    paths = {str(PROGRAMS[name]): name for name in names}
    completed = subprocess.run(
        [sys.executable, FOLDER / "running.py", which, *paths],
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
    )
    assert completed.returncode == 0, completed.stderr
    found = json.loads(completed.stdout.splitlines()[-1])
    return {paths[path]: outcome for path, outcome in found.items()}


@pytest.fixture(scope="module")
def ours():
    return outcomes("ours", PROGRAMS)


@pytest.fixture(scope="module")
def theirs():
    pytest.importorskip("flax")
    return outcomes("flax", PROGRAMS)


def test_there_are_programs_of_each_version():
    versions = [name.partition("/")[0] for name in PROGRAMS]
    assert {version: versions.count(version) >= 10 for version in versions} == {
        "v0_8": True,
        "v0_10": True,
        "v0_11": True,
        "v0_12": True,
    }


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_runs_and_warns_of_deprecated_lines_only(ours, name):
    outcome = ours[name]
    assert outcome["raised"] is None, outcome["raised"]
    assert outcome["printed"]
    lines = [0, *PROGRAMS[name].read_text().splitlines()]
    unmarked = [lines[n] for n in outcome["warned"] if "# deprecated" not in lines[n]]
    assert unmarked == []


@pytest.mark.peers
@pytest.mark.parametrize("name", sorted(PROGRAMS.keys() - GONE))
def test_flax_prints_the_same_and_warns_wherever_we_do(ours, theirs, name):
    assert theirs[name]["raised"] is None, theirs[name]["raised"]
    assert ours[name]["printed"] == theirs[name]["printed"]
    assert set(ours[name]["warned"]) <= set(theirs[name]["warned"])


@pytest.mark.peers
@pytest.mark.parametrize("name", sorted(GONE))
def test_what_is_marked_as_gone_fails_in_flax(theirs, name):
    assert theirs[name]["raised"]
