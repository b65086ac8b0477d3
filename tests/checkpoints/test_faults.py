"""What can't be read or written, or is killed: one clear error, nothing lost.

`tests.stress.faults` and `tests.stress.kills` do more of it.
"""

import gc
import pathlib
import shutil
import tempfile

import pytest

from tests.stress import faults, kills


@pytest.mark.parametrize("make", faults.READS, ids=lambda make: make.__name__)
def test_what_is_no_fitting_checkpoint_is_one_clear_error(tmp_path, make):
    make(tmp_path / "there")
    message = faults.read_fault(tmp_path / "there")
    assert len(message.splitlines()) < 8


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


@pytest.mark.parametrize(
    ("number", "seed"), [(2, 0), pytest.param(6, 1, marks=pytest.mark.long)]
)
def test_a_killed_save_loses_nothing_and_leaves_nothing_that_loads(number, seed):
    options = kills.read_options(["--kills", f"{number}", "--seed", f"{seed}"])
    _, expected = kills.run(options)
    assert expected.done["series"] and expected.done["single"]
