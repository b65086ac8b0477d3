"""What can't be read or written, or is killed: one clear error, nothing lost.

And a run that goes on is the run that was never interrupted, bit by bit. The programs
of `tests.stress` do more of it.
"""

import copy
import gc
import itertools
import pathlib
import random
import shutil
import tempfile

import jax
import pytest

from graftree import checkpoints
from tests import tables
from tests.stress import faults, kills, resumes, trainings


@pytest.mark.parametrize("make", faults.READS, ids=lambda make: make.__name__)
def test_what_is_no_fitting_checkpoint_is_one_clear_error(tmp_path, make):
    make(tmp_path / "there")
    assert len(faults.read_fault(tmp_path / "there").splitlines()) < 8


@pytest.fixture
def open_folder():
    """A folder that other users may enter, unlike that of pytest."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        folder.chmod(0o755)
        yield folder


@pytest.mark.parametrize("title", faults.WRITES)
def test_nothing_is_lost_where_nothing_can_be_written(open_folder, capfd, title):
    messages = faults.WRITES[title](open_folder)
    assert all("folder" in m or "path" in m or "larger" in m for m in messages)
    assert capfd.readouterr() == ("", "")


# TensorStore tells threads of Orbax that have ended by then that a read has failed.
@pytest.mark.filterwarnings(
    "ignore:Exception ignored in. None:pytest.PytestUnraisableExceptionWarning"
)
@pytest.mark.parametrize("damage", faults.DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_file_is_one_clear_error_or_does_no_harm(tmp_path, damage):
    faults.good_series(tmp_path / "good")
    for name in faults.files_of(tmp_path / "good"):
        shutil.copytree(tmp_path / "good", tmp_path / "bad")
        message = faults.damage_of_step(tmp_path / "bad", name, damage)
        shutil.rmtree(tmp_path / "bad")
        # Orbax has no checksums of the numbers, which docs/guides/checkpoints.md says.
        if damage is not faults.flip or "ocdbt.process_0/d/" not in name:
            assert message is None or "estore" in message, name
    gc.collect()  # what is told then belongs to this test


@tables.cases("number, seed", (1, 0), pytest.param(6, 1, marks=pytest.mark.long))
def test_a_killed_save_loses_nothing_and_leaves_nothing_that_loads(number, seed):
    options = kills.read_options(["--kills", f"{number}", "--seed", f"{seed}"])
    _, expected = kills.run(options)
    assert expected.done["series"] and expected.done["single"]


@pytest.fixture(scope="module")
def step():
    return trainings.make_step()


def train(steps, step, made, data, mesh):
    """The losses of some steps, bit by bit."""
    batches = (trainings.next_batch(data, mesh) for _ in range(steps))
    return [float(step(made, *batch)).hex() for batch in batches]


@pytest.mark.parametrize("name", ["2x4", pytest.param("1x1", marks=pytest.mark.long)])
def test_resumed_run_is_the_unbroken_one_bit_by_bit(tmp_path, step, name):
    mesh = trainings.make_mesh(name)
    with jax.set_mesh(mesh):
        made, data = trainings.make_objects(16), trainings.make_data()
        again = copy.deepcopy(made)  # with its transformation: `step` is compiled once
        with checkpoints.Checkpoints(tmp_path) as kept:
            first = train(2, step, made, data, mesh)
            kept.save(1, **made, **data)
            # The arrays that are being saved are donated, and the data goes on.
            rest = train(2, step, made, data, mesh)
        end = trainings.digest(made, data)

        data = trainings.make_data()
        assert train(1, step, again, data, mesh) == first[:1]
        with checkpoints.Checkpoints(tmp_path) as kept:
            assert kept.restore_latest(**again, **data) == 1
        assert train(2, step, again, data, mesh) == rest
        assert trainings.digest(again, data) == end


@pytest.mark.long
def test_a_run_goes_on_over_other_devices(tmp_path, step):
    losses = []
    with checkpoints.Checkpoints(tmp_path) as kept:
        for name, number in zip(["1x8", "2x4", "1x1"], itertools.count()):
            mesh = trainings.make_mesh(name)
            with jax.set_mesh(mesh):
                made, data = trainings.make_objects(16), trainings.make_data()
                kept.restore_latest(**made, **data)
                losses += train(1, step, made, data, mesh)
                kept.save(number, **made, **data)
    mesh = trainings.make_mesh("1x1")
    with jax.set_mesh(mesh):
        made, data = trainings.make_objects(16), trainings.make_data()
        unbroken = train(3, step, made, data, mesh)
    found, expected = ([*map(float.fromhex, x)] for x in (losses, unbroken))
    assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.long
def test_killed_processes_go_on_bit_by_bit(tmp_path):
    options = resumes.read_options(["--kills", "2"])
    tally = resumes.break_often("2x4/2", tmp_path, options, random.Random(1))
    assert tally.kills + tally.stops == 2 and tally.losses > 0
