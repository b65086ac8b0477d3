"""The command line: ``python -m examples.digits``.

Wrong options and an unusable output folder are answered at once: one line, exit code 2.
"""

import argparse
import pathlib
import sys
from collections.abc import Sequence

from examples.command_lines import (
    INTERRUPTED,
    OneLineParser,
    interrupts_deferred,
    whole_number,
)


def make_parser() -> OneLineParser:
    """Returns the parser of the options."""
    parser = OneLineParser(
        prog="python -m examples.digits",
        description="Trains a small network on 1,797 real handwritten digits.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add, number = parser.add_argument, whole_number(1, 1000)
    decides = "decides the split, the first weights, the order and the dropout"
    made = "folder for the checkpoint and the pictures; made if missing"
    folder = pathlib.Path("out/digits")
    add("--epochs", type=number, default=20, metavar="N", help="over all digits")
    add("--batch-size", type=number, default=64, metavar="N", help="digits per step")
    add("--seed", type=whole_number(0, 2**31 - 1), default=0, metavar="N", help=decides)
    add("--output", type=pathlib.Path, default=folder, metavar="DIR", help=made)
    return parser


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
    parser.make_writable(options.output)
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
