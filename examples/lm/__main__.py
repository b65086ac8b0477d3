"""The command line: ``python -m examples.lm``.

Wrong options and an unusable output folder are answered at once: one line, exit code 2.
"""

import argparse
import math
import os
import pathlib
import sys
from collections.abc import Sequence

from examples.command_lines import (
    INTERRUPTED,
    SIMULATED,
    OneLineParser,
    interrupts_deferred,
    simulate,
    whole_number,
)
from examples.lm import processes, settings
from examples.lm.settings import Settings, WrongOption


def temperature(text: str) -> float:
    """Converts an option that takes 0 to 10."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number <= 10:
        raise argparse.ArgumentTypeError(
            f"expected a number from 0 to 10, got {text!r}"
        )
    return number


def make_parser() -> OneLineParser:
    """Returns the parser of the options; what they are by default says `Settings`."""
    parser = OneLineParser(
        prog="python -m examples.lm",
        description="Trains a language model on two books, on one device or many. The "
        "same command goes on where the last run in its folder stopped, even with "
        "another --mesh.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    add = parser.add_argument

    def number(option: str, least: int, most: int, meaning: str) -> None:
        add(option, type=whole_number(least, most), metavar="N", help=meaning)

    mesh = (
        "sizes of axes, some of data, fsdp and tensor, as in fsdp=4,tensor=2 "
        "(default: all devices along data)"
    )
    devices = "devices that the CPU simulates (default: as many as --mesh has)"
    several = (
        "processes on this machine that share the devices, as on a cluster; "
        f"without --mesh, each has {processes.EACH} (default: one)"
    )
    policy = "f32, bf16, or a policy of nnx.precision, as in params=f32,compute=bf16"
    folder = "folder for checkpoints, curve and picture; made if missing"
    parse_mesh = settings.converted(settings.parse_mesh)
    add("--mesh", type=parse_mesh, metavar="AXES", help=mesh)
    number("--devices", 1, 1024, devices)
    number("--processes", 1, 64, several)
    add("--stack", action="store_true", help="blocks as an nnx.Stack")
    add("--remat", action="store_true", help="compute blocks again in gradients")
    number(
        "--accumulate", 1, 4096, "parts in which the gradient of a batch is computed"
    )
    number("--steps", 1, 10**6, "training steps")
    number("--batch-size", 1, 4096, "pieces of text per step, over all devices")
    number("--length", 8, 8192, "bytes per piece")
    number(
        "--seed", 0, 2**31 - 1, "decides the first weights, the batches and the sample"
    )
    number("--every", 1, 10**6, "steps between tests, and between checkpoints")
    number("--layers", 1, 1000, "blocks")
    number("--width", 2, 65536, "features of a byte between the blocks")
    number("--heads", 1, 1024, "query heads")
    number("--kv-heads", 1, 1024, "key and value heads")
    number("--hidden", 1, 2**18, "features inside an MLP")
    number("--sample", 1, 8192, "bytes of text to write at the end")
    add("--precision", metavar="POLICY", help=policy)
    add("--prompt", metavar="TEXT", help="what the sample of text begins with")
    drawn = "how freely it is drawn; 0: the likeliest bytes"
    add("--temperature", type=temperature, metavar="T", help=drawn)
    add("--output", type=pathlib.Path, metavar="DIR", help=folder)
    defaults = vars(Settings())
    parser.set_defaults(**{name: defaults[name] for name in defaults if name != "mesh"})
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the example.

    Args:
        arguments: The options; ``None`` takes them from the command line.

    Returns:
        The exit code: 0; 130 after Ctrl-C and 143 after SIGTERM, when all has been
        saved; 1 if the results could not be written.

    Raises:
        SystemExit: With code 2, after one line on stderr, if an option is wrong or the
            output folder can't be written.
    """
    parser = make_parser()
    given = vars(parser.parse_args(arguments))
    devices = given.pop("devices", None)
    count = given.pop("processes", 1)
    if devices is None and "mesh" not in given and count > 1:
        devices = count * processes.EACH
    if devices is not None:
        given.setdefault("mesh", {"data": devices})
    options = Settings(**given)
    try:
        options.check()
    except WrongOption as error:
        parser.error(str(error))
    parser.make_writable(options.output)
    if count > 1 and not processes.is_one_of_several():
        devices = devices or math.prod(options.mesh.values())
        if devices % count:
            parser.error(f"--processes: {count} can't share {devices} devices equally")
        return processes.run(
            sys.argv[1:] if arguments is None else arguments,
            count,
            devices,
            options.output,
        )
    if processes.is_one_of_several():
        processes.join()
    elif devices is not None or SIMULATED not in os.environ.get("XLA_FLAGS", ""):
        simulate(devices or math.prod(options.mesh.values()))
    with interrupts_deferred() as interrupted:
        # Not at the top: JAX takes seconds to load, a wrong option needs none of it.
        from examples.lm import experiment

        if interrupted.is_set():
            print("interrupted before the training began", file=sys.stderr)
            return INTERRUPTED
        try:
            stopped = experiment.run(options, should_stop=interrupted.is_set)
        except WrongOption as error:
            parser.error(str(error))
        except OSError as error:  # such as a full disk
            print(f"{parser.prog}: error: {error}", file=sys.stderr)
            return 1
    return 128 + stopped if stopped is not None else 0


if __name__ == "__main__":
    sys.exit(main())
