"""The digits example: its results, its answers to mistakes, and Ctrl-C."""

import contextlib
import io
import re
import runpy
import signal
import sys
import threading

import numpy as np
import pytest

import graftree as nnx
from examples.digits import __main__ as command
from examples.digits import data, experiment, models, report, train
from tests import interpreters
from tests.examples import commands
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
    model = models.DigitClassifier(rngs=nnx.Rngs(seed))
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
    command.make_writable(folder)
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
    commands.check_output_that_is_no_folder(capsys, command.main, file, below)


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

    test = data.load(seed=0).test
    untrained = trained_for_nothing(0)
    restored = nnx.checkpoints.restore(tmp_path / "checkpoint", untrained)
    assert train.evaluate(restored, test).loss < train.evaluate(untrained, test).loss


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
    with command.interrupts_deferred() as interrupted:
        signal.raise_signal(signal.SIGINT)
        assert interrupted.is_set()
    assert signal.getsignal(signal.SIGINT) is handler


def test_stopped_run_saves_and_reports_nothing_else(capsys, tmp_path):
    options = {"epochs": 5, "batch_size": 512, "seed": 0, "output": tmp_path}
    assert not experiment.run(**options, should_stop=lambda: True)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    assert capsys.readouterr().out.startswith("interrupted: the model so far was saved")


def test_split_is_fixed_by_its_seed_and_shares_out_all_digits_evenly():
    first, again, other = (data.load(seed=seed).test.images for seed in (3, 3, 4))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    train_part, test_part = data.load(seed=0)
    assert (len(train_part.labels), len(test_part.labels)) == (1437, 360)
    counts = np.bincount(test_part.labels)
    assert counts.min() >= 34 and counts.max() <= 37


def test_batches_are_full_and_repeat_no_digit():
    examples = data.Batch(np.arange(10), np.arange(10))
    parts = list(data.batches(examples, 4, np.random.default_rng(0)))
    assert len(parts) == data.batch_count(examples, 4) == 2
    assert len(np.unique(np.concatenate([part.labels for part in parts]))) == 8


@pytest.mark.parametrize("wrong", [0, 1, 9, 100])
def test_misclassified_picture_takes_any_number_of_digits(tmp_path, wrong):
    test = data.load(seed=0).test
    predicted = test.labels.copy()
    predicted[:wrong] = (predicted[:wrong] + 1) % 10
    report.draw_misclassified(test, predicted, tmp_path / "wrong.png")
    assert (tmp_path / "wrong.png").read_bytes().startswith(PNG_SIGNATURE)


@pytest.mark.peers
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_network_gives_the_numbers_of_flax(monkeypatch, mode):
    peer = pytest.importorskip("flax.nnx")
    ours = models.DigitClassifier(rngs=nnx.Rngs(0))
    monkeypatch.setitem(sys.modules, "graftree", peer)
    theirs = runpy.run_path(models.__file__)["DigitClassifier"](rngs=peer.Rngs(0))
    images, found = data.load(seed=0).test.images, []
    for library, model in (nnx, ours), (peer, theirs):
        getattr(model, mode)()
        found.append(library.jit(lambda model, images: model(images))(model, images))
    np.testing.assert_allclose(*found, rtol=1e-5, atol=1e-6)
