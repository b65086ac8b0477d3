"""What importing a library adds to a program that has imported JAX."""

import os
import pathlib
import subprocess
import sys

from benchmarks.gauges import Operation

PROGRAM = """
import time
import jax
start = time.perf_counter()
import {module}
print(time.perf_counter() - start)
"""


# Of its own, since a machine may be told to write no bytecode where the sources are.
BYTECODE = pathlib.Path(__file__).parents[1] / "out" / "bytecode"


def seconds(module: str) -> Operation:
    """Imports a module after JAX, in a new process, and gives the seconds it took.

    The first run compiles to bytecode, as an installation does; the later ones load it.
    """
    command = [sys.executable, "-c", PROGRAM.format(module=module)]
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(BYTECODE)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)

    def operation():
        run = subprocess.run(
            command, capture_output=True, text=True, check=True, env=environment
        )
        return float(run.stdout)

    return operation
