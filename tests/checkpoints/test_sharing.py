"""Many at one folder: one writes at a time, and who reads gets one whole checkpoint.

Uses `graftree.checkpoints` itself: nothing else can let go of a lock as the system does
when a process is killed, or have a step deleted between two steps of a reader.
"""

import functools
import gc
import os
import signal
import subprocess
import sys
import threading

import jax.numpy as jnp
import pytest

import graftree as nnx
from graftree import checkpoints, errors, file_locks
from graftree.checkpoints import orbax_side, processes
from tests.checkpoints.saved_objects import Iterator
from tests.comparisons import raises
from tests.threads import run_in_threads


def tree(step):
    """Arrays that tell a mixture of two steps."""
    return {name: jnp.full(3, step) for name in "abc"}


def step_of(state):
    """The step whose values these are."""
    numbers = {int(x) for name in "abc" for x in state[name]}
    assert len(numbers) == 1, numbers
    return numbers.pop()


def save_steps(folder, *steps):
    with checkpoints.Checkpoints(folder) as kept:
        for step in steps:
            assert kept.save(step, m=tree(step))


# ----------------------------------------------------------------------------- writers

WRITER = """
import sys
import jax.numpy as jnp
import graftree as nnx
series = nnx.checkpoints.Checkpoints(sys.argv[1])
series.save(1, m={name: jnp.full(3, 1) for name in "abc"})
series.wait()
print("saved", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def other(tmp_path):
    """Another program that has saved a step, and goes on."""
    command = [sys.executable, "-c", WRITER, tmp_path]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        assert process.stdout.readline() == "saved\n"
        yield process
        process.kill()


def test_a_second_program_may_read_and_writes_once_the_first_is_killed(tmp_path, other):
    with checkpoints.Checkpoints(tmp_path) as kept:
        who = f"is being written by process {other.pid} on "
        with raises(errors.CheckpointError, who, "Choose another folder"):
            kept.save(2, m=tree(2))
        state = nnx.State(tree(0))
        assert kept.restore_latest(m=state) == step_of(state) == 1
        assert kept.steps() == [1]
        other.send_signal(signal.SIGKILL)
        other.wait()
        assert kept.save(2, m=tree(2))
    assert sorted(os.listdir(tmp_path)) == ["1", "2"]


def test_writers_of_one_program_take_turns(tmp_path, monkeypatch):
    goes_on = threading.Event()
    delete = checkpoints.Checkpoints._delete_old

    def delete_late(kept):
        goes_on.wait()
        delete(kept)

    monkeypatch.setattr(checkpoints.Checkpoints, "_delete_old", delete_late)
    first, second = [checkpoints.Checkpoints(tmp_path) for _ in range(2)]
    first.save(1, m=tree(1))
    with pytest.raises(errors.CheckpointError, match="another writer in this process"):
        second.save(2, m=tree(2))
    goes_on.set()
    first.wait()
    for step, kept in ((2, second), (3, first), (4, second)):
        assert kept.save(step, m=tree(step))
        kept.wait()
    with pytest.raises(errors.CheckpointError, match="step 4 has already been saved"):
        first.save(4, m=tree(4))
    for kept in (second, first):
        kept.close()
    assert sorted(os.listdir(tmp_path)) == ["2", "3", "4"]


def test_the_lock_of_a_series_that_nobody_has_is_free(tmp_path):
    kept = checkpoints.Checkpoints(tmp_path / "own")
    kept.save(1, m=tree(1))
    kept.wait()
    del kept
    gc.collect()
    assert os.listdir(tmp_path / "own") == ["1"]


def test_threads_that_save_to_one_path_do_so_one_at_a_time(tmp_path):
    told, refused, begin = [], [], threading.Barrier(4)

    def save(number):
        begin.wait()
        try:
            checkpoints.save(tmp_path / "a", tree(number), overwrite=True)
            told.append(number)
        except errors.CheckpointError as error:
            refused.append(str(error))

    checkpoints.save(tmp_path / "a", tree(9))
    run_in_threads(*[functools.partial(save, number) for number in range(4)])
    assert all("is being written by another" in text for text in refused), refused
    assert step_of(checkpoints.restore(tmp_path / "a", tree(0))) in told
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_fork_does_not_keep_the_lock(tmp_path):
    lock = processes.Lock(tmp_path / "lock", tmp_path)
    lock.take()
    ready, end = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:  # It lives on when its parent lets go.
        os.write(ready[1], b".")
        os.read(end[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    os.close(lock._descriptor)  # as when the parent is killed
    processes._locks.clear()
    try:
        processes.Lock(tmp_path / "lock", tmp_path).take()
    finally:
        os.write(end[1], b".")
        os.waitpid(child, 0)


def test_a_folder_that_was_deleted_is_locked_anew(tmp_path):
    lock = processes.Lock(tmp_path / "run" / "lock", tmp_path)
    lock.take()
    (tmp_path / "run" / "lock").unlink()
    other = processes.Lock(tmp_path / "run" / "lock", tmp_path)
    other.take()
    with pytest.raises(errors.CheckpointError, match="is being written by"):
        lock.take()
    other.release()
    lock.take()
    lock.release()
    assert not os.listdir(tmp_path / "run")


def test_a_file_system_without_locks_keeps_nobody_out(tmp_path, monkeypatch):
    def refuse(descriptor, how):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(file_locks.fcntl, "flock", refuse)
    save_steps(tmp_path, 1)
    assert os.listdir(tmp_path) == ["1"]


# ----------------------------------------------------------------------------- readers


@pytest.fixture
def meanwhile(monkeypatch):
    """Has something done once, before the reader's Nth step on disk."""

    def arrange(number, act):
        left = [number]

        def then(function):
            def wrapped(*args):
                left[0] -= 1
                if left[0] == 0:
                    act()
                return function(*args)

            return wrapped

        for name in ("read_contents", "read", "is_tree", "_check_whole", "_handler"):
            monkeypatch.setattr(orbax_side, name, then(getattr(orbax_side, name)))
        return left

    return arrange


@pytest.mark.parametrize("number", range(1, 11))
def test_a_step_deleted_while_it_is_read_gives_the_next(tmp_path, meanwhile, number):
    with checkpoints.Checkpoints(tmp_path, keep=1) as writer:
        writer.save(1, m=tree(1), n=tree(1), at=Iterator(1))
        writer.wait()

        def save():
            writer.save(2, m=tree(2), n=tree(2), at=Iterator(2))
            writer.wait()

        left = meanwhile(number, save)
        m, n, at = nnx.State(tree(0)), nnx.State(tree(0)), Iterator()
        found = checkpoints.Checkpoints(tmp_path).restore_latest(m=m, n=n, at=at)
    assert left[0] <= 0  # the reader came to this
    assert found == step_of(m) == step_of(n) == at.state == 2


@pytest.mark.parametrize("number", [2, 5])
def test_a_deleted_step_that_was_asked_for_is_not_damaged(tmp_path, meanwhile, number):
    with checkpoints.Checkpoints(tmp_path, keep=1) as writer:
        writer.save(1, m=tree(1))
        writer.wait()
        meanwhile(number, lambda: writer.save(2, m=tree(2)) and writer.wait())
        state = nnx.State(tree(0))
        with pytest.raises(errors.CheckpointError, match="no step 1 .*Saved steps: 2"):
            checkpoints.Checkpoints(tmp_path).restore(1, m=state)
    assert step_of(state) == 0


@pytest.mark.parametrize("number", range(1, 7))
def test_a_checkpoint_replaced_while_read_is_no_mixture(tmp_path, meanwhile, number):
    path = tmp_path / "a"
    checkpoints.save(path, tree(1))
    left = meanwhile(number, lambda: checkpoints.save(path, tree(2), overwrite=True))
    assert step_of(checkpoints.restore(path, tree(0))) == 2
    assert left[0] <= 0


def test_a_reader_that_is_always_too_slow_is_told(tmp_path, monkeypatch):
    checkpoints.save(tmp_path / "a", tree(1))
    read = orbax_side.read

    def replaced(*args):
        checkpoints.save(tmp_path / "a", tree(2), overwrite=True)
        return read(*args)

    monkeypatch.setattr(orbax_side, "read", replaced)
    with pytest.raises(errors.CheckpointError, match="replaced during the read"):
        checkpoints.restore(tmp_path / "a", tree(0))


def test_a_damaged_step_stays_an_error(tmp_path):
    save_steps(tmp_path, 1, 2)
    (tmp_path / "2" / "m" / "_METADATA").write_text("{")
    with pytest.raises(errors.CheckpointError, match="is damaged"):
        checkpoints.Checkpoints(tmp_path).restore_latest(m=nnx.State(tree(0)))


# TensorStore tells threads of Orbax that have ended by then that a read has failed.
@pytest.mark.filterwarnings(
    "ignore:Exception ignored in. None:pytest.PytestUnraisableExceptionWarning"
)
def test_a_reader_that_polls_sees_whole_steps_in_order(tmp_path):
    ended, seen = threading.Event(), [0]

    def write():
        try:
            with checkpoints.Checkpoints(tmp_path / "run", keep=1) as kept:
                for step in range(1, 13):
                    kept.save(step, m=tree(step))
                    checkpoints.save(tmp_path / "a", tree(step), overwrite=True)
        finally:
            ended.set()

    def read():
        while not ended.is_set():
            state, kept = nnx.State(tree(0)), checkpoints.Checkpoints(tmp_path / "run")
            seen.append(kept.restore_latest(m=state) or 0)
            assert seen[-1] == step_of(state) >= seen[-2]
            step_of(checkpoints.restore(tmp_path / "a", tree(0)))

    checkpoints.save(tmp_path / "a", tree(0))
    run_in_threads(write, read)
    assert seen[-1] > 1


def test_a_step_that_comes_while_the_last_one_goes_is_found(tmp_path, monkeypatch):
    save_steps(tmp_path, 1)
    is_step, asked = orbax_side.is_step, []

    def ask(folder):
        if not asked:  # what a writer with keep=1 does when it has saved step 2
            asked.append((tmp_path / "1").rename(tmp_path / "2"))
        return is_step(folder)

    monkeypatch.setattr(orbax_side, "is_step", ask)
    assert checkpoints.Checkpoints(tmp_path).restore_latest(m=nnx.State(tree(0))) == 2


def test_threads_of_a_failed_save_that_go_on_are_left():
    class Thread(threading.Thread):
        def join(self, timeout=None):
            raise TimeoutError("did not complete")

    Thread.__module__ = "orbax.checkpoint"
    ended = threading.Event()
    Thread(target=ended.wait, daemon=True).start()
    try:
        orbax_side.let_threads_fail(0.01)
    finally:
        ended.set()


def test_a_step_of_an_object_store_is_whole_while_it_is_marked(tmp_path, monkeypatch):
    """Where no folder can be renamed, its mark is written last and deleted first."""
    save_steps(tmp_path, 1, 2, 3)
    monkeypatch.setattr(orbax_side, "is_remote", lambda folder: True)
    store = checkpoints.Checkpoints(tmp_path, keep=1)
    (tmp_path / "3" / orbax_side.COMMITTED).unlink()
    assert store.steps() == [1, 2]

    def stops(folder):
        raise OSError("the network is down")

    with monkeypatch.context() as patch:
        patch.setattr(type(orbax_side.path_of(tmp_path)), "rmtree", stops)
        with pytest.raises(OSError, match="network"):
            store._delete_old()
    assert store.steps() == [2] and store.restore_latest(m=nnx.State(tree(0))) == 2
    (tmp_path / "1" / orbax_side.COMMITTED).touch()
    store._delete_old()
    assert sorted(os.listdir(tmp_path)) == ["2", "3"]
