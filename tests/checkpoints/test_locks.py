"""One writer at a time: the second one is refused, and a killed one blocks nobody."""

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading

import jax.numpy as jnp
import pytest

import graftree as nnx
from graftree import checkpoints, errors
from graftree.checkpoints import locks

WRITER = """
import sys
import jax.numpy as jnp
import graftree as nnx
series = nnx.checkpoints.Checkpoints(sys.argv[1])
series.save(1, x={"x": jnp.ones(2)})
series.wait()
print("saved", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def other(tmp_path):
    """Another program that has saved a step, and goes on."""
    command = [sys.executable, "-c", textwrap.dedent(WRITER), tmp_path]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        assert process.stdout.readline() == "saved\n"
        yield process
        process.kill()


def saved(step):
    return {"x": {"x": jnp.full(2, step)}}


def test_a_second_program_is_told_of_the_first_and_may_read(tmp_path, other):
    with checkpoints.Checkpoints(tmp_path) as series:
        with pytest.raises(errors.CheckpointError) as caught:
            series.save(2, **saved(2))
        assert f"is written by process {other.pid} on " in str(caught.value)
        assert "Choose another folder" in str(caught.value)
        state = nnx.State({"x": jnp.zeros(2)})
        assert series.restore_latest(x=state) == 1 and state["x"].tolist() == [1, 1]
        assert series.steps() == [1]


def test_the_lock_of_a_killed_program_is_free(tmp_path, other):
    other.send_signal(signal.SIGKILL)
    other.wait()
    with checkpoints.Checkpoints(tmp_path) as series:
        assert series.save(2, **saved(2))
    assert sorted(os.listdir(tmp_path)) == ["1", "2"]


def test_a_program_that_ends_without_closing_leaves_nothing(tmp_path, other):
    other.communicate("\n")
    assert os.listdir(tmp_path) == ["1"]


def test_writers_of_one_program_take_turns(tmp_path, monkeypatch):
    goes_on = threading.Event()
    delete = checkpoints.Checkpoints._delete_old

    def delete_late(series):
        goes_on.wait()
        delete(series)

    monkeypatch.setattr(checkpoints.Checkpoints, "_delete_old", delete_late)
    first, second = [checkpoints.Checkpoints(tmp_path) for _ in range(2)]
    first.save(1, **saved(1))
    with pytest.raises(errors.CheckpointError, match="another writer in this process"):
        second.save(2, **saved(2))
    goes_on.set()
    first.wait()
    for step, series in ((2, second), (3, first), (4, second)):
        assert series.save(step, **saved(step))
        series.wait()
    with pytest.raises(errors.CheckpointError, match="step 4 has been saved"):
        first.save(4, **saved(4))
    for series in (second, first):
        series.close()
    assert sorted(os.listdir(tmp_path)) == ["2", "3", "4"]


def test_the_lock_of_a_series_that_nobody_has_is_free(tmp_path):
    series = checkpoints.Checkpoints(tmp_path / "own")
    series.save(1, **saved(1))
    series.wait()
    del series
    gc.collect()
    assert os.listdir(tmp_path / "own") == ["1"]


def test_threads_that_save_to_one_path_do_so_one_at_a_time(tmp_path):
    told, refused, begin = [], [], threading.Barrier(4)

    def save(number):
        begin.wait()
        try:
            checkpoints.save(tmp_path / "a", saved(number), overwrite=True)
            told.append(number)
        except errors.CheckpointError as error:
            refused.append(str(error))

    checkpoints.save(tmp_path / "a", saved(9))
    threads = [threading.Thread(target=save, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all("is written by another writer" in text for text in refused), refused
    restored = checkpoints.restore(tmp_path / "a", saved(0))
    assert restored["x"]["x"].tolist() in [[number] * 2 for number in told]
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_fork_does_not_keep_the_lock(tmp_path):
    lock = locks.Lock(tmp_path / "lock", tmp_path)
    lock.take()
    ready, end = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:  # It lives on when its parent lets go.
        os.write(ready[1], b".")
        os.read(end[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    os.close(lock._descriptor)  # as when the parent is killed
    locks._held.clear()
    try:
        locks.Lock(tmp_path / "lock", tmp_path).take()
    finally:
        os.write(end[1], b".")
        os.waitpid(child, 0)


def test_a_folder_that_was_deleted_is_locked_anew(tmp_path):
    lock = locks.Lock(tmp_path / "run" / "lock", tmp_path)
    lock.take()
    (tmp_path / "run" / "lock").unlink()
    other = locks.Lock(tmp_path / "run" / "lock", tmp_path)
    other.take()
    with pytest.raises(errors.CheckpointError, match="is written by"):
        lock.take()
    other.release()
    lock.take()
    lock.release()
    assert not os.listdir(tmp_path / "run")


def test_a_file_system_without_locks_keeps_nobody_out(tmp_path, monkeypatch):
    def refuse(descriptor, how):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(locks.fcntl, "flock", refuse)
    with checkpoints.Checkpoints(tmp_path) as series:
        assert series.save(1, **saved(1))
    assert os.listdir(tmp_path) == ["1"]
