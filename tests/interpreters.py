"""Other interpreters of Python, started in the root of this repository."""

import os
import subprocess
import sys

from tests import sources


def start(*arguments, stderr=subprocess.PIPE, **variables):
    """Starts Python, with more variables in its environment; its output is text."""
    paths = {"PYTHONPATH": f"{sources.ROOT / 'src'}:{sources.ROOT}"}
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        cwd=sources.ROOT,
        env=paths | os.environ | variables,
    )


def printed(*arguments, **variables):
    """What Python has printed at its end, which must be a good one."""
    with start(*arguments, **variables) as process:
        out, errors = process.communicate()
    assert process.returncode == 0, out + errors
    return out
