"""What the programs of the gallery print: a figure on each line, ``label: value``."""

import pathlib
import subprocess
import sys

ERROR = "error"
FOLDER = pathlib.Path(__file__).parent

# In the order of the page.
PROGRAMS = (
    "decoding",
    "scan_memory",
    "merge_dropout",
    "tracing",
    "slow_step",
    "eager_control_flow",
    "new_optimizers",
    "restored_layers",
    "repeated_keys",
    "closed_over_rnn",
)


def measure(program: str, *options: str) -> dict[str, str]:
    """The figures of a program in a process of its own, by label.

    Args:
        program: Its name.
        options: What Python gets before the path of the program.

    Returns:
        Its figures. If it fails, there is one more: the name of the error, by ERROR.
    """
    command = [sys.executable, *options, str(FOLDER / f"{program}.py")]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    failed = {ERROR: _error(run.stderr)} if run.returncode else {}
    return read(run.stdout) | failed


def read(output: str) -> dict[str, str]:
    """The figures in what a program printed."""
    return dict(line.split(": ", 1) for line in output.splitlines())


def _error(stderr: str) -> str:
    """The name of the exception in a traceback, without its module."""
    names = [
        line.split(":")[0].rpartition(".")[2]
        for line in stderr.splitlines()
        if line[:1].isalpha() and ":" in line and "Error" in line.split(":")[0]
    ]
    return names[-1] if names else stderr.strip().splitlines()[-1]
