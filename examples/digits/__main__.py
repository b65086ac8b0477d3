"""The command line: ``python -m examples.digits``.

Wrong options and an unusable output folder are answered at once: one line, exit code 2.
"""

import argparse
import contextlib
import pathlib
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

INTERRUPTED = 130  # what a shell reports of a program that Ctrl-C ended


class OneLineParser(argparse.ArgumentParser):
    """A parser that leaves the usage out of its error messages."""

    def error(self, message: str) -> NoReturn:
        """Prints ``message`` as one line and exits with code 2."""
        self.exit(2, f"{self.prog}: error: {message}\n")


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


def make_parser() -> OneLineParser:
    """Returns the parser of the options."""
    parser = OneLineParser(
        prog="python -m examples.digits",
        description="Trains a small network on 1,797 real handwritten digits.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--epochs",
        type=whole_number(1, 1000),
        default=20,
        metavar="N",
        help="how often to go over the training digits",
    )
    parser.add_argument(
        "--batch-size",
        type=whole_number(1, 1024),
        default=64,
        metavar="N",
        help="digits per training step",
    )
    parser.add_argument(
        "--seed",
        type=whole_number(0, 2**31 - 1),
        default=0,
        metavar="N",
        help="decides the split, the first weights, the order and the dropout",
    )
    parser.add_argument(
        "--output",
        type=pathlib.Path,
        default=pathlib.Path("out/digits"),
        metavar="DIR",
        help="folder for the checkpoint and the pictures; made if missing",
    )
    return parser


def make_writable(folder: pathlib.Path) -> None:
    """Makes ``folder`` if it is missing, and tries that files can be made in it.

    Raises:
        OSError: If either is impossible.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Asking for the permission bits is not enough: disks can be full or read-only.
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"x")


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


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the example.

    Args:
        arguments: The options; ``None`` takes them from the command line.

    Returns:
        The exit code: 0; 130 after Ctrl-C; 1 if the results could not be written.

    Raises:
        SystemExit: With code 2, after one line on stderr, if an option is wrong or the
            output folder can't be written.
    """
    parser = make_parser()
    options = parser.parse_args(arguments)
    try:
        make_writable(options.output)
    except OSError as error:
        parser.error(f"cannot write to the folder {options.output}: {error.strerror}")
    with interrupts_deferred() as interrupted:
        # Not at the top: JAX takes seconds to load, a wrong option needs none of it.
        from examples.digits import experiment

        if interrupted.is_set():
            print("interrupted before the training began", file=sys.stderr)
            return INTERRUPTED
        try:
            finished = experiment.run(**vars(options), should_stop=interrupted.is_set)
        except OSError as error:  # such as a full disk
            print(f"{parser.prog}: error: {error}", file=sys.stderr)
            return 1
    return 0 if finished else INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
