"""The language-model example in two processes; tests/stress/neighbours.py kills one."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from examples.lm import __main__ as command
from examples.lm import layouts, loops, processes, settings
from tests import sources

SIZES = {"layers": 1, "width": 16, "heads": 4, "kv_heads": 2, "hidden": 32}
OPTIONS = settings.Settings(
    mesh={"data": 2, "fsdp": 2}, steps=2, batch_size=64, length=64, every=2, **SIZES
)


def as_arguments(options):
    numbers = ("steps", "batch_size", "length", "every", *SIZES)
    listed = [f"--{n.replace('_', '-')}={getattr(options, n)}" for n in numbers]
    return [f"--mesh={settings.in_words(options.mesh)}", "--sample=1", *listed]


def test_two_processes_train_as_one_does(tmp_path):
    told = ["--processes=2", f"--output={tmp_path}", *as_arguments(OPTIONS)]
    # Without the devices of this process; both compute while it does.
    environment = {**os.environ, "PYTHONPATH": f"{sources.ROOT / 'src'}"}
    with subprocess.Popen(
        [sys.executable, "-m", "examples.lm", *told],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=sources.ROOT,
        env=environment,
    ) as both:
        layout = layouts.make(OPTIONS.mesh)
        with layout.in_force():
            job = loops.Job(OPTIONS, layout)
            expected = [float(job.step(number)) for number in (1, 2)]
        out, errors = both.communicate(timeout=120)
    assert both.returncode == 0, out + errors
    assert "4 of cpu in 2 process(es)" in out and errors == ""
    found = json.loads((tmp_path / "run.json").read_text())["curve"]["training"]
    # Sums in another order move a loss near 6 by a few units in the last place.
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def test_devices_that_processes_can_not_share_are_refused(tmp_path, capsys):
    told = ["--processes=3", "--mesh=data=4", f"--output={tmp_path}"]
    with pytest.raises(SystemExit):
        command.main(told)
    assert "--processes: 3 can't share 4 devices equally" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("codes", "code", "words"),
    [
        ([0, 0], 0, ""),
        ([1, -9], 1, "process 1 ended (killed by SIGKILL)"),
        ([None, 3], 1, "process 1 ended (exit code 3)"),
        ([-6, None], 1, "process 0 ended (killed by SIGABRT)"),
        ([2, 2], 2, "--mesh: wrong"),
    ],
)
def test_one_line_says_which_process_failed(tmp_path, capsys, codes, code, words):
    logs = [tmp_path / f"process-{number}.log" for number in range(2)]
    for log in logs:
        log.write_text("noise\nerror: --mesh: wrong\n")
    assert processes.judge(codes, logs) == code
    text = capsys.readouterr().err
    assert words in text and text.count("\n") == (1 if code else 0)
