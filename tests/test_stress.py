"""A few seeded rounds of the programs in ``tests/stress``; they run for minutes."""

import os
import subprocess
import sys

from tests import sources
from tests.stress import shared_weights


def test_threads_that_call_new_functions_at_once_do_not_crash():
    # Issue 12, §7: the process died. So it is not the one that runs the tests.
    command = [sys.executable, "-m", "tests.stress.threads", "--rounds", "2"]
    environment = {**os.environ, "PYTHONFAULTHANDLER": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=sources.ROOT
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 rounds")


def test_two_processes_load_and_save_weights():
    shared_weights.main([])
