"""The peer: the same network as an ONNX file, run by onnxruntime.

The ONNX file holds other weights than the safetensors file beside it, and calls them by
other names. So both sets are compared, each with itself.
"""

import pathlib
from typing import Any, NamedTuple

import jax
import numpy as np
import onnx
import onnxruntime
from google.protobuf import message
from onnx import numpy_helper
from safetensors import numpy as safetensors

import graftree as nnx
from examples.speech import model, pretrained

TOLERANCE = 1e-4

# How names begin in the ONNX file, and in the safetensors file.
NAMES = {
    "model.stft.forward_basis_buffer": "stft_conv.weight",
    "model.encoder.0.reparam_conv": "conv1",
    "model.encoder.1.reparam_conv": "conv2",
    "model.encoder.2.reparam_conv": "conv3",
    "model.encoder.3.reparam_conv": "conv4",
    "model.decoder.rnn": "lstm_cell",
    "model.decoder.decoder.2": "final_conv",
}


class Differences(NamedTuple):
    """The largest differences of two probabilities of the same chunk.

    Attributes:
        of_safetensors: Model and peer, both with the weights of the safetensors file.
        of_onnx: Model and peer, both with the weights of the ONNX file.
        of_weights: The peer with the one and with the other.
    """

    of_safetensors: float
    of_onnx: float
    of_weights: float


def compare(weights: pathlib.Path, audio: np.ndarray) -> Differences:
    """Compares the model with the ONNX file beside its weights.

    Args:
        weights: The safetensors file.
        audio: A recording, ``[samples]``.

    Raises:
        ValueError: If the two files have not the same tensors, or one can't be read.
        OSError: If there is not an ONNX file.
    """
    peer = load(weights.parent / pretrained.ONNX)
    detector = pretrained.load(weights)
    ours = model.detect(detector, audio[None])[0]
    nnx.weights.load(tensors_of(peer), detector, model.WEIGHTS)
    ours_of_onnx = model.detect(detector, audio[None])[0]
    theirs_of_onnx = listen(peer, audio)
    put_tensors(peer, safetensors.load_file(weights))
    theirs = listen(peer, audio)
    return Differences(
        _largest(ours, theirs),
        _largest(ours_of_onnx, theirs_of_onnx),
        _largest(theirs, theirs_of_onnx),
    )


def _largest(found: jax.Array | np.ndarray, expected: np.ndarray) -> float:
    return float(np.max(np.abs(np.asarray(found) - expected)))


def load(path: pathlib.Path) -> onnx.ModelProto:
    """Reads an ONNX file; a ValueError or OSError says why it can't be."""
    try:
        return onnx.load(path)
    except message.DecodeError as error:
        raise ValueError(f"{path} is not an ONNX file: {error}.") from error


def listen(peer: onnx.ModelProto, audio: np.ndarray) -> np.ndarray:
    """The probabilities that onnxruntime computes, chunk by chunk, ``[chunks]``."""
    session = onnxruntime.InferenceSession(
        peer.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    audio = np.pad(audio, (model.CONTEXT, -len(audio) % model.CHUNK))
    inputs: dict[str, Any] = {"sr": np.array(model.SAMPLE_RATE)}
    inputs["state"] = np.zeros((2, 1, model.WIDTH), np.float32)
    found = []
    for start in range(0, len(audio) - model.CONTEXT, model.CHUNK):
        inputs["input"] = audio[None, start : start + model.CONTEXT + model.CHUNK]
        probability, inputs["state"] = session.run(None, inputs)
        found.append(probability.item())
    return np.array(found)


def tensors_of(peer: onnx.ModelProto) -> dict[str, np.ndarray]:
    """The weights of the peer, by the names of the safetensors file."""
    return {_name(x.name): numpy_helper.to_array(x) for x in peer.graph.initializer}


def put_tensors(peer: onnx.ModelProto, tensors: dict[str, np.ndarray]) -> None:
    """Gives the peer other weights: all of them.

    Raises:
        ValueError: If names, shapes or dtypes are others.
    """
    shapes = {name: (x.shape, x.dtype) for name, x in tensors_of(peer).items()}
    others = {name: (x.shape, x.dtype) for name, x in tensors.items()}
    if shapes != others:
        different = {name for name, _ in shapes.items() ^ others.items()}
        raise ValueError(f"the ONNX file has other tensors: {sorted(different)}")
    for held in peer.graph.initializer:
        held.CopyFrom(numpy_helper.from_array(tensors[_name(held.name)], held.name))


def _name(name: str) -> str:
    """What the safetensors file calls a tensor of the ONNX file."""
    for theirs, ours in NAMES.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name
