"""The command line: ``python -m examples.speech``."""

import argparse
import importlib.util
import pathlib
import sys
import time
from collections.abc import Sequence

import numpy as np

from examples.speech import model, pretrained, recordings, report, segments
from graftree import errors

PEERS = ("onnx", "onnxruntime", "safetensors")


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the options."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.speech",
        description="Finds speech in a recording, with the weights of Silero VAD.",
    )
    add, out = parser.add_argument, pathlib.Path("out/speech")
    wav = "16 kHz, mono, 16 bits; default: the one of this example"
    weights = (
        f"a file {pretrained.WEIGHTS}, or the folder that has it; default: "
        f"downloaded from PyPI once, in the wheel of {pretrained.REQUIREMENT}"
    )
    drawn = "where the picture goes; made if missing; default: %(default)s"
    compared = "compare with onnxruntime and the ONNX file beside the weights"
    recording = {"nargs": "?", "default": recordings.EXAMPLE}
    add("recording", metavar="WAV", type=pathlib.Path, help=wav, **recording)
    add("--weights", metavar="PATH", type=pathlib.Path, help=weights)
    add("--out", metavar="FOLDER", type=pathlib.Path, default=out, help=drawn)
    add("--compare", action="store_true", help=f"{compared}, and fail if they differ")
    return parser


def run(options: argparse.Namespace) -> int:
    """Listens, prints and draws; returns the exit code."""
    weights = options.weights or pretrained.fetch()
    if weights.is_dir():
        weights = weights / pretrained.WEIGHTS
    audio = recordings.read(options.recording)
    detector = pretrained.load(weights)
    probabilities = listen(detector, audio)
    found = segments.of(probabilities, len(audio) / model.SAMPLE_RATE)
    for start, end in found:
        print(f"speech from {start:.2f} s to {end:.2f} s")
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"{options.recording.stem}.png"
    report.draw(audio, probabilities, found, path)
    print(f"wrote {path}")
    return compare(weights, audio) if options.compare else 0


def listen(detector: model.SpeechDetector, audio: np.ndarray) -> np.ndarray:
    """Returns the probability of each chunk; prints how long that takes."""
    model.detect(detector, audio[None]).block_until_ready()  # compiles
    start = time.perf_counter()
    probabilities = np.asarray(model.detect(detector, audio[None])[0])
    taken, seconds = time.perf_counter() - start, len(audio) / model.SAMPLE_RATE
    print(
        f"{seconds:.1f} s of audio, {len(probabilities)} chunks, took "
        f"{1e3 * taken:.1f} ms once compiled: {taken / seconds:.5f} of its time"
    )
    return probabilities


def compare(weights: pathlib.Path, audio: np.ndarray) -> int:
    """Prints the differences from onnxruntime; returns 1 if they are too large."""
    # Not at the top: only this needs them.
    from examples.speech import comparison

    found = comparison.compare(weights, audio)
    print(
        "largest difference from onnxruntime\n"
        f"  with the weights of the safetensors file: {found.of_safetensors:.1e}\n"
        f"  with the weights of the ONNX file: {found.of_onnx:.1e}\n"
        f"  (from one set of weights to the other: {found.of_weights:.1e})"
    )
    if max(found.of_safetensors, found.of_onnx) <= comparison.TOLERANCE:
        return 0
    print(f"that is more than {comparison.TOLERANCE}", file=sys.stderr)
    return 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the example.

    Args:
        arguments: The options; ``None`` takes them from the command line.

    Returns:
        The exit code: 0, or 1 if something could not be read, written or downloaded, or
        if the comparison fails.
    """
    parser = make_parser()
    options = parser.parse_args(arguments)
    missing = [name for name in PEERS if importlib.util.find_spec(name) is None]
    if options.compare and missing:
        parser.error(
            f"--compare needs {', '.join(missing)}: pip install {' '.join(missing)}"
        )
    try:
        return run(options)
    except (
        pretrained.UnavailableError,
        errors.GraftreeError,
        OSError,
        ValueError,
    ) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
