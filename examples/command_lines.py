"""What the command lines of the examples have in common.

Nothing here loads JAX, so that wrong options are answered at once.
"""

import argparse
import contextlib
import os
import pathlib
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import NoReturn

INTERRUPTED = 130  # what a shell reports of a program that Ctrl-C ended
SIMULATED = "--xla_force_host_platform_device_count"


class OneLineParser(argparse.ArgumentParser):
    """A parser that leaves the usage out of its error messages."""

    def error(self, message: str) -> NoReturn:
        """Prints ``message`` as one line and exits with code 2."""
        self.exit(2, f"{self.prog}: error: {message}\n")

    def make_writable(self, folder: pathlib.Path) -> None:
        """Makes ``folder`` if it is missing; an error if no file can be made in it."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # To ask for the permission bits is not enough: a disk can be full.
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(b"x")
        except OSError as error:
            self.error(f"cannot write to the folder {folder}: {error.strerror}")


def whole_number(least: int, most: int) -> Callable[[str], int]:
    """Returns a converter for an option that takes ``least`` to ``most``."""

    def convert(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = None
        if number is None or not least <= number <= most:
            raise argparse.ArgumentTypeError(
                f"expected a whole number from {least} to {most}, got {text!r}"
            )
        return number

    return convert


@contextlib.contextmanager
def interrupts_deferred() -> Iterator[threading.Event]:
    """Turns Ctrl-C into an event to look at.

    An exception in its place could cut a training step in two, and crashes the
    interpreter when it hits the import of some extension modules.
    """
    interrupted = threading.Event()

    def note(*_: object) -> None:
        interrupted.set()
        print("Ctrl-C: finishing the step in progress", file=sys.stderr)

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, previous)


def simulate(devices: int) -> None:
    """Has the CPU simulate devices, if JAX is not loaded yet."""
    if "jax" in sys.modules:
        return
    flags = os.environ.get("XLA_FLAGS", "").split()
    others = [flag for flag in flags if not flag.startswith(SIMULATED)]
    os.environ["XLA_FLAGS"] = " ".join([*others, f"{SIMULATED}={devices}"])
