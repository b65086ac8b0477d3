"""What importing a library adds to a program that has imported JAX."""

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


def seconds(module: str) -> Operation:
    """Imports a module after JAX, in a new process, and gives the seconds it took."""
    command = [sys.executable, "-c", PROGRAM.format(module=module)]

    def operation():
        run = subprocess.run(command, capture_output=True, text=True, check=True)
        return float(run.stdout)

    return operation
