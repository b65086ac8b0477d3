"""Who reads while somebody else saves gets one whole checkpoint, or a clear error."""

import threading

import jax.numpy as jnp
import pytest

import graftree as nnx
from graftree import checkpoints, errors
from graftree.checkpoints import orbax_side, series


def tree(step):
    """Arrays that tell a mixture of two steps."""
    return {name: jnp.full(3, step) for name in "abc"}


def step_of(state):
    """The step whose values these are."""
    numbers = {int(x) for name in "abc" for x in state[name]}
    assert len(numbers) == 1, numbers
    return numbers.pop()


class Position:
    """Stands for a data iterator."""

    def __init__(self, at=0):
        self.at = at

    def get_state(self):
        return {"at": self.at}

    def set_state(self, state):
        self.at = state["at"]


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

        for name in ("read_facts", "read", "is_tree", "_check_whole", "_handler"):
            monkeypatch.setattr(orbax_side, name, then(getattr(orbax_side, name)))
        return left

    return arrange


@pytest.mark.parametrize("number", range(1, 11))
def test_a_step_deleted_while_it_is_read_gives_the_next_one(
    tmp_path, meanwhile, number
):
    with checkpoints.Checkpoints(tmp_path, keep=1) as writer:
        writer.save(1, m=tree(1), n=tree(1), at=Position(1))
        writer.wait()

        def save():
            writer.save(2, m=tree(2), n=tree(2), at=Position(2))
            writer.wait()

        left = meanwhile(number, save)
        m, n, at = nnx.State(tree(0)), nnx.State(tree(0)), Position()
        found = checkpoints.Checkpoints(tmp_path).restore_latest(m=m, n=n, at=at)
    assert left[0] <= 0  # the reader came to this
    assert found == step_of(m) == step_of(n) == at.at
    assert found == 2


@pytest.mark.parametrize("number", [2, 5])
def test_a_step_that_was_asked_for_and_deleted_is_not_called_damaged(
    tmp_path, meanwhile, number
):
    with checkpoints.Checkpoints(tmp_path, keep=1) as writer:
        writer.save(1, m=tree(1))
        writer.wait()
        meanwhile(number, lambda: writer.save(2, m=tree(2)) and writer.wait())
        state = nnx.State(tree(0))
        with pytest.raises(errors.CheckpointError, match="no step 1 .*Saved are: 2"):
            checkpoints.Checkpoints(tmp_path).restore(1, m=state)
    assert step_of(state) == 0


@pytest.mark.parametrize("number", range(1, 7))
def test_a_checkpoint_replaced_while_it_is_read_is_no_mixture(
    tmp_path, meanwhile, number
):
    checkpoints.save(tmp_path / "a", tree(1))
    left = meanwhile(
        number, lambda: checkpoints.save(tmp_path / "a", tree(2), overwrite=True)
    )
    assert step_of(checkpoints.restore(tmp_path / "a", tree(0))) == 2
    assert left[0] <= 0


def test_a_reader_that_is_always_too_slow_is_told(tmp_path, monkeypatch):
    checkpoints.save(tmp_path / "a", tree(1))
    read = orbax_side.read

    def replaced(*args):
        checkpoints.save(tmp_path / "a", tree(2), overwrite=True)
        return read(*args)

    monkeypatch.setattr(orbax_side, "read", replaced)
    with pytest.raises(errors.CheckpointError, match="replaced while it was read"):
        checkpoints.restore(tmp_path / "a", tree(0))


def test_a_damaged_step_stays_an_error(tmp_path):
    with checkpoints.Checkpoints(tmp_path) as series:
        for step in (1, 2):
            series.save(step, m=tree(step))
        series.wait()
        (tmp_path / "2" / "m" / "_METADATA").write_text("{")
        with pytest.raises(errors.CheckpointError, match="is damaged"):
            series.restore_latest(m=nnx.State(tree(0)))


# TensorStore tells threads of Orbax that have ended by then that a read has failed.
@pytest.mark.filterwarnings(
    "ignore:Exception ignored in. None:pytest.PytestUnraisableExceptionWarning"
)
def test_a_reader_that_polls_sees_whole_steps_in_order(tmp_path):
    ended, seen = threading.Event(), [0]

    def write():
        try:
            with checkpoints.Checkpoints(tmp_path / "run", keep=1) as series:
                for step in range(1, 31):
                    series.save(step, m=tree(step))
                    checkpoints.save(tmp_path / "a", tree(step), overwrite=True)
        finally:
            ended.set()

    checkpoints.save(tmp_path / "a", tree(0))
    writer = threading.Thread(target=write)
    writer.start()
    while not ended.is_set():
        state = nnx.State(tree(0))
        found = checkpoints.Checkpoints(tmp_path / "run").restore_latest(m=state) or 0
        assert found == step_of(state) >= seen[-1]
        seen.append(found)
        step_of(checkpoints.restore(tmp_path / "a", tree(0)))
    writer.join()
    assert seen[-1] > 1


def test_a_step_that_comes_while_the_last_one_goes_is_found(tmp_path, monkeypatch):
    with checkpoints.Checkpoints(tmp_path) as kept:
        kept.save(1, m=tree(1))
    is_step, asked = series._is_step, []

    def ask(folder):
        if not asked:  # what a writer with keep=1 does when it has saved step 2
            asked.append((tmp_path / "1").rename(tmp_path / "2"))
        return is_step(folder)

    monkeypatch.setattr(series, "_is_step", ask)
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
