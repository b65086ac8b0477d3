"""A few seeded rounds of the programs in ``tests/stress``; they run for minutes."""

import json
import sys

import pytest

from tests import interpreters
from tests.stress import shared_weights


def test_threads_that_call_new_functions_at_once_do_not_crash():
    # Issue 12, §7: the process died. So it is not the one that runs the tests.
    command = ["-m", "tests.stress.threads", "--rounds=1"]
    assert interpreters.printed(*command, PYTHONFAULTHANDLER="1").startswith("1 rounds")


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
