"""Programs as they were written for Flax 0.8 to 0.12 run unchanged.

A program of ``corpus`` imports only Flax, JAX and Optax, and prints what it finds on
one subject. Lines that use a deprecated spelling end in ``# deprecated``; no other line
may warn. What today's Flax has no longer says so in its docstring.

All run in one process.
"""

import functools
import itertools
import json
import pathlib

import pytest

from tests import interpreters

FOLDER = pathlib.Path(__file__).parent / "corpus"
VERSIONS = ["v0_8", "v0_10", "v0_11", "v0_12"]
PROGRAMS = {version: sorted(FOLDER.glob(f"{version}/*.py")) for version in VERSIONS}


def is_gone(program):
    return "Not in Flax today" in program.read_text()


@functools.cache
def outcomes(which):
    """What the programs did, on Graftree or on Flax."""
    command = ["-m", "tests.interop.corpus.running", which]
    printed = interpreters.printed(*command, *itertools.chain(*PROGRAMS.values()))
    return json.loads(printed.splitlines()[-1])


def test_there_are_programs_for_each_version():
    assert all(len(programs) >= 6 for programs in PROGRAMS.values())


def test_programs_run_and_warn_of_deprecated_lines_only():
    found = outcomes("ours")
    for program in itertools.chain(*PROGRAMS.values()):
        outcome = found[str(program)]
        assert outcome["raised"] is None, f"{program}: {outcome['raised']}"
        assert outcome["printed"], program
        lines = ["", *program.read_text().splitlines()]
        warned = [lines[number] for number in outcome["warned"]]
        assert all("# deprecated" in line for line in warned), (program, warned)


@pytest.mark.long
@pytest.mark.peers
@pytest.mark.parametrize("version", VERSIONS)
def test_flax_prints_the_same_and_warns_wherever_we_do(version):
    pytest.importorskip("flax")
    ours, theirs = outcomes("ours"), outcomes("flax")
    for program in PROGRAMS[version]:
        mine, flax = ours[str(program)], theirs[str(program)]
        if is_gone(program):
            assert flax["raised"], f"{program}: Flax has it"
            continue
        assert flax["raised"] is None, f"{program}: {flax['raised']}"
        assert mine["printed"] == flax["printed"], program
        assert set(mine["warned"]) <= set(flax["warned"]), program
