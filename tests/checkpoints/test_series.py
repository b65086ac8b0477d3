"""`nnx.checkpoints.Checkpoints`: the steps of a training run, its end, its data."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import graftree as nnx
from graftree import errors
from graftree.checkpoints import data_states
from tests import tables, threads
from tests.checkpoints.saved_objects import Iterator
from tests.comparisons import raises

Checkpoints = nnx.checkpoints.Checkpoints


def objects(seed=0):
    """All that a training run has."""
    model = nnx.Dict(w=nnx.Param(jnp.full(2, 1.0 + seed)))
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    rngs, data = nnx.Rngs(seed), Iterator(seed)
    return {"model": model, "optimizer": optimizer, "rngs": rngs, "data": data}


def test_only_the_newest_steps_are_kept(tmp_path):
    with Checkpoints(tmp_path, keep=2, every=3) as checkpoints:
        saved = [checkpoints.save(step, rngs=nnx.Rngs(0)) for step in range(1, 11)]
        assert saved == [step % 3 == 0 for step in range(1, 11)]
        assert checkpoints.save(10, force=True, rngs=nnx.Rngs(0))
        assert checkpoints.steps() == [9, 10]
    assert sorted(os.listdir(tmp_path)) == ["10", "9"]


def save_scored(folder, losses, **options):
    """Saves a step for each loss, whose weights are its number; returns the steps."""
    model, first = nnx.Dict(w=nnx.Param(jnp.zeros(()))), 0
    with Checkpoints(folder, best="loss", **options) as checkpoints:
        first = (checkpoints.latest_step() or 0) + 1
        for step, loss in enumerate(losses, first):
            model.w[...] = jnp.array(float(step))
            checkpoints.save(step, model=model, scores={"loss": loss, "other": -step})
        return checkpoints.steps()


NAN = float("nan")


@tables.cases(
    "scores, mode",
    ([0.1, 0.3, 0.2], "min"),
    ([0.3, 0.1, 0.2], "max"),
    ([0.1, 0.1, 0.1], "min"),
    ([0.1, NAN, NAN], "max"),
    ([0.1, np.inf, 0.2], "min"),
    ([np.float64(0.1), jnp.array(0.2), jnp.array(1)], "min"),
)
def test_the_best_step_is_kept_beside_the_newest(tmp_path, scores, mode):
    options = {"keep": 1, "mode": mode}
    assert save_scored(tmp_path, scores, **options) == [1, 3]
    # A program that begins again knows it, and keeps it.
    assert save_scored(tmp_path, [NAN], **options) == [1, 4]
    model = nnx.Dict(w=nnx.Param(jnp.zeros(())))
    checkpoints = Checkpoints(tmp_path, best="loss", mode=mode)
    assert checkpoints.best_step() == checkpoints.restore_best(model=model) == 1
    assert model.w[...] == 1
    better = {"min": -1.0, "max": 1.0}[mode]
    assert save_scored(tmp_path, [better], **options) == [5]
    assert save_scored(tmp_path, [better, better], **options) == [5, 7]


def test_nothing_is_the_best_without_a_number(tmp_path):
    checkpoints = Checkpoints(tmp_path, best="loss")
    assert checkpoints.best_step() is checkpoints.restore_best(rngs=nnx.Rngs(0)) is None
    assert save_scored(tmp_path, [NAN, np.inf, NAN], keep=2) == [2, 3]
    with pytest.raises(errors.CheckpointError, match=r"'loss' is a number .*: 2, 3"):
        checkpoints.restore_best(model=nnx.Rngs(0))
    assert Checkpoints(tmp_path, best="other").best_step() == 3
    with pytest.raises(ValueError, match=r'best="loss"'):
        Checkpoints(tmp_path).restore_best(model=nnx.Rngs(0))


@tables.cases(
    "scores, kind, message",
    ({"accuracy": 1}, ValueError, "'loss' is missing.*\n.*'accuracy'"),
    (None, ValueError, "'loss' is missing"),
    ({"loss": jnp.ones(3)}, TypeError, r"'loss' .* got float32\[3\]"),
    ({"loss": 1, "name": "x"}, TypeError, "'name' .* got a str"),
    (nnx.Rngs(0), TypeError, "got a Rngs.\nTo save an object, use"),
)
def test_wrong_scores_are_named_before_any_write(tmp_path, scores, kind, message):
    checkpoints = Checkpoints(tmp_path / "new", every=2, best="loss")
    # Who doesn't save need not evaluate.
    assert not checkpoints.save(1, rngs=nnx.Rngs(0))
    with pytest.raises(kind, match=message):
        checkpoints.save(2, rngs=nnx.Rngs(0), scores=scores)
    assert not (tmp_path / "new").exists()


def test_nothing_is_deleted_while_scores_can_not_be_read(tmp_path):
    save_scored(tmp_path, [0.1, 0.2], keep=2)
    (tmp_path / "1" / "_CHECKPOINT_METADATA").write_text("{")
    with pytest.raises(errors.CheckpointError, match="Step 3 was saved, but deleting"):
        save_scored(tmp_path, [0.3], keep=2)
    with pytest.raises(errors.CheckpointError, match=f"Reading {tmp_path}/1 failed"):
        Checkpoints(tmp_path, best="loss").best_step()
    assert Checkpoints(tmp_path).steps() == [1, 2, 3]


def test_what_happens_after_save_does_not_reach_it(tmp_path):
    """Donation, writes into refs and into NumPy arrays, all before it is on disk."""
    size = 1_000_000
    model = nnx.Dict(
        donated=nnx.Param(jnp.arange(size)),
        ref=nnx.Variable(jnp.arange(size), ref=True),
        array=nnx.Variable(np.arange(size)),
    )
    data = Iterator({"at": 0})
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, model=model, data=data)
        data.state["at"] = 1
        model.array[...][:] = -1
        model.ref[...] = -jnp.ones(size, int)
        jax.jit(lambda x: -x, donate_argnums=0)(model.donated[...]).block_until_ready()
        model.donated.set_value(jnp.zeros(size, int))
        checkpoints.restore(0, model=model, data=data)
    for name in ("donated", "ref", "array"):
        np.testing.assert_array_equal(model[name][...], np.arange(size))
    assert data.state == {"at": 0}


def test_error_in_the_background_reaches_the_next_call(tmp_path, monkeypatch):
    break_commits(monkeypatch)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, rngs=nnx.Rngs(0))
    with pytest.raises(errors.CheckpointError) as e:
        checkpoints.steps()
    assert str(e.value).startswith(f"Saving step 1 to {tmp_path} failed.")
    assert "No space left" in str(e.value.__cause__)
    for _ in range(3):
        running = {*threading.enumerate()}
        with pytest.raises(errors.CheckpointError):
            checkpoints.save(1, rngs=nnx.Rngs(0))
            checkpoints.wait()
    assert {*threading.enumerate()} <= running  # each failed save has ended its own
    monkeypatch.undo()
    assert checkpoints.save(1, rngs=nnx.Rngs(0)) and checkpoints.steps() == [1]
    checkpoints.close()
    assert os.listdir(tmp_path) == ["1"]


def test_error_in_the_background_reaches_close(tmp_path, monkeypatch):
    break_commits(monkeypatch)
    with pytest.raises(errors.CheckpointError, match="Saving step 1"):
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(1, rngs=nnx.Rngs(0))


def test_old_steps_that_can_not_be_deleted_do_not_unsay_the_save(tmp_path, monkeypatch):
    from etils import epath

    def fail(self):
        raise OSError(13, "Permission denied")

    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, rngs=nnx.Rngs(0))
    checkpoints.wait()
    monkeypatch.setattr(type(epath.Path(tmp_path)), "rmtree", fail)
    checkpoints.save(2, rngs=nnx.Rngs(0))
    with pytest.raises(errors.CheckpointError, match="Step 2 was saved, but deleting"):
        checkpoints.wait()
    monkeypatch.undo()
    assert checkpoints.steps() == [2] and checkpoints.save(3, rngs=nnx.Rngs(0))
    checkpoints.close()
    assert os.listdir(tmp_path) == ["3"]


def test_error_of_the_program_is_not_hidden_by_one_of_a_save(tmp_path, monkeypatch):
    break_commits(monkeypatch)
    with raises(KeyError, "Saving step 1"), Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, rngs=nnx.Rngs(0))
        raise KeyError


def break_commits(monkeypatch):
    """Makes the last step of a save in the background fail."""
    import orbax.checkpoint

    def fail(self, folder):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(orbax.checkpoint.CompositeCheckpointHandler, "finalize", fail)


PROGRAM = """
import sys
import jax.numpy as jnp
import graftree as nnx
model = nnx.Dict(x=nnx.Param(jnp.ones(3_000_000)))
waited = nnx.checkpoints.Checkpoints(sys.argv[1] + "/waited")
waited.save(1, model=model)
waited.wait()
nnx.checkpoints.Checkpoints(sys.argv[1] + "/not").save(1, model=model)
"""


def test_program_that_ends_without_closing_has_saved_and_leaves_no_lock(tmp_path):
    program = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(program, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert os.listdir(tmp_path / "waited") == os.listdir(tmp_path / "not") == ["1"]


def test_steps_are_saved_once_and_in_order(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(5, rngs=nnx.Rngs(0))
        with pytest.raises(errors.CheckpointError, match="step 5 has already"):
            checkpoints.save(5, rngs=nnx.Rngs(0))
        with pytest.raises(errors.CheckpointError, match="step 4 comes before 5"):
            checkpoints.save(4, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with steps 1 and 2 of a run."""
    folder = tmp_path_factory.mktemp("saved")
    with Checkpoints(folder) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, **objects(step))
    return folder


def test_unknown_step_names_the_known_ones(saved):
    with pytest.raises(errors.CheckpointError, match="no step 7 .*Saved steps: 1, 2"):
        Checkpoints(saved).restore(7, **objects())


def test_objects_asked_for_must_be_those_saved(saved):
    run = objects()
    asked = "ema: requested, but not saved", "optimizer: saved, but not requested"
    ways = "pass data=None, optimizer=None, rngs=None"
    with raises(errors.CheckpointError, *asked, ways):
        Checkpoints(saved).restore_latest(model=run["model"], ema=nnx.Rngs(0))


def test_object_may_be_left_on_disk_in_so_many_words(saved):
    run = objects(seed=3)
    before = run["rngs"].default.key[...]
    names = {"data": None, "optimizer": None, "rngs": None}
    assert Checkpoints(saved).restore_latest(model=run["model"], **names) == 2
    assert run["rngs"].default.key[...] is before


def test_nothing_is_written_if_one_object_does_not_fit(saved):
    run = objects(seed=3)
    run["optimizer"] = nnx.Linear(2, 4, rngs=nnx.Rngs(0))
    value = run["model"].w[...]
    with pytest.raises(errors.StateMismatchError, match="optimizer/kernel"):
        Checkpoints(saved).restore_latest(**run)
    assert run["model"].w[...] is value and run["data"].state == 3


def test_nothing_is_written_if_an_iterator_refuses_its_state(saved):
    class Picky(Iterator):
        def set_state(self, state):
            super().set_state(state)
            if state:
                raise ValueError("no")

    run = objects(seed=3) | {"data": Picky()}
    value = run["model"].w[...]
    with pytest.raises(ValueError, match="no"):
        Checkpoints(saved).restore_latest(**run)
    assert run["model"].w[...] is value and run["data"].state == 0


def test_what_cannot_be_filled_is_told_the_way_out(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, pair={"x": (jnp.ones(2), nnx.Rngs(0))})
        pair = {"x": (jnp.zeros(2), nnx.Rngs(1))}
        way = f'nnx.checkpoints.restore("{tmp_path}/1/<name>", like)'
        with raises(ValueError, "pair/x/0", "can't be replaced", way):
            checkpoints.restore_latest(pair=pair)
    restored = nnx.checkpoints.restore(tmp_path / "1" / "pair", pair)
    assert restored["x"][0].tolist() == [1, 1]


def test_objects_of_a_step_are_filled_and_can_be_read_by_themselves(saved):
    run = objects()
    w = run["model"].w
    assert Checkpoints(saved).restore_latest(**run) == 2
    assert run["model"].w is w and w[...].tolist() == [3.0, 3.0]
    assert run["data"].state == 2
    assert nnx.checkpoints.restore(saved / "1" / "model", run["model"]).w[0] == 2.0


def test_a_refused_save_does_not_keep_other_writers_out(tmp_path):
    refused = nnx.Dict(text=nnx.Variable("hello"))
    with Checkpoints(tmp_path) as checkpoints, Checkpoints(tmp_path) as others:
        with pytest.raises(TypeError, match="text"):
            checkpoints.save(1, model=refused)
        assert others.save(1, rngs=nnx.Rngs(0))


def test_half_written_and_half_deleted_steps_do_not_count(saved, tmp_path):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    (tmp_path / "2").rename(tmp_path / "2.orbax-checkpoint-tmp")
    (tmp_path / "1").rename(tmp_path / "1.graftree-deleted")
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.restore_latest(**objects()) is None
        checkpoints.save(2, rngs=nnx.Rngs(0))
    assert os.listdir(tmp_path) == ["2"]


def test_folder_that_cannot_be_made_is_one_clear_error(tmp_path):
    (tmp_path / "file").touch()
    with Checkpoints(tmp_path / "file" / "run") as checkpoints:
        with pytest.raises(errors.CheckpointError, match="Part of the path is a file"):
            checkpoints.save(1, rngs=nnx.Rngs(0))


@tables.cases(
    "name, value", ("keep", 0), ("every", 0), ("every", 1.5), ("mode", "a"), ("best", 1)
)
def test_wrong_options_are_refused(tmp_path, name, value):
    with pytest.raises(ValueError, match=f"expects {name}"):
        Checkpoints(tmp_path, **{name: value})


def test_wrong_objects_are_refused(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(ValueError, match="expects the objects"):
            checkpoints.save(1)
        with pytest.raises(TypeError, match="model is None"):
            checkpoints.save(1, model=None)
        with pytest.raises(TypeError, match="data: <root> is of type list_iterator"):
            checkpoints.save(1, data=iter([]))
        with pytest.raises(ValueError, match="expects a step >= 0, got -1"):
            checkpoints.save(-1, rngs=nnx.Rngs(0))
        for name in ("_METADATA", "_CHECKPOINT_METADATA", "__", "é.", ""):
            with pytest.raises(ValueError, match="not a name for a saved object"):
                checkpoints.save(1, **{name: nnx.Rngs(0)})
        assert checkpoints.steps() == []
    with pytest.raises(ValueError, match="save: this Checkpoints has been closed"):
        checkpoints.save(1, rngs=nnx.Rngs(0))


# ------------------------------------------------------------------------- should_stop


@pytest.fixture
def signals():
    """Counts the signals that reach the handler of the program."""
    received = []
    before = signal.signal(signal.SIGTERM, lambda *_: received.append(1))
    yield received
    signal.signal(signal.SIGTERM, before)


def send():
    os.kill(os.getpid(), signal.SIGTERM)


def test_first_signal_is_noted_and_the_next_goes_to_the_program(tmp_path, signals):
    with Checkpoints(tmp_path) as checkpoints:
        assert not checkpoints.should_stop(1)
        send()
        assert checkpoints.should_stop(2) and not signals
        send()
        assert checkpoints.should_stop(3) and signals == [1]


def test_signal_is_the_programs_before_the_first_question(tmp_path, signals):
    with Checkpoints(tmp_path):
        send()
    assert signals == [1]


def test_close_puts_the_handler_back(tmp_path, signals):
    handler = signal.getsignal(signal.SIGTERM)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.should_stop(1)
        assert signal.getsignal(signal.SIGTERM) is not handler
    assert signal.getsignal(signal.SIGTERM) is handler
    send()
    assert signals == [1]


def test_all_who_ask_are_told(tmp_path, signals):
    with Checkpoints(tmp_path) as first, Checkpoints(tmp_path) as second:
        assert not first.should_stop(1) and not second.should_stop(1)
        send()
        assert first.should_stop(2) and second.should_stop(2) and not signals
    with Checkpoints(tmp_path) as third:
        assert not third.should_stop(1)


def test_handler_of_the_program_is_left_alone(tmp_path, signals):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.should_stop(1)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def test_a_handler_that_another_thread_could_not_put_back_keeps_no_signal(
    tmp_path, signals
):
    checkpoints = Checkpoints(tmp_path)
    assert not checkpoints.should_stop(1)
    threads.run_in_threads(checkpoints.close)
    send()
    assert signals == [1]
    with Checkpoints(tmp_path) as again:
        assert not again.should_stop(1)
        send()
        assert again.should_stop(2) and signals == [1]
        send()
        assert signals == [1, 1]


def test_a_handler_left_by_another_thread_serves_the_next_who_asks(tmp_path, signals):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.should_stop(1)
    threads.run_in_threads(checkpoints.close)
    with Checkpoints(tmp_path) as again:
        assert not again.should_stop(1)
        send()
        assert again.should_stop(2) and not signals
    send()
    assert signals == [1]


def test_first_question_in_another_thread_is_refused(tmp_path):
    def ask():
        with pytest.raises(RuntimeError, match="in the main thread first"):
            Checkpoints(tmp_path).should_stop(1)

    threads.run_in_threads(ask)


# ------------------------------------------------------------- states of data iterators


STATES = [
    None,
    [True, -1, 2**200, 1.5, "text"],
    {"nested": {"a": [1, {"b": ()}]}, "$odd": 1},
    {1: "one", (2, 3): b"\x00\xff", None: [b""]},
    (1, (2, "three")),
    float("inf"),
    np.random.default_rng(3).bit_generator.state,
    np.random.RandomState(3).get_state(),
]


def stored(folder, states):
    """A folder with the states of several processes."""
    each = [data_states.to_json("data", Iterator(state)) for state in states]
    (folder / "metadata").write_text(json.dumps({"processes": each}, allow_nan=False))
    return folder


@pytest.mark.parametrize("state", STATES, ids=lambda state: type(state).__name__)
def test_states_come_back_as_they_were(tmp_path, state):
    back = data_states.from_json("data", stored(tmp_path, [state]), 0, 1)
    assert repr(back) == repr(state)  # types too


@pytest.mark.parametrize("dtype", ["uint32", ">i2", "float16", "complex64", "bool"])
def test_arrays_come_back_with_their_dtype(tmp_path, dtype):
    array = np.arange(6).reshape(2, 3).astype(dtype)
    back = data_states.from_json("data", stored(tmp_path, [array]), 0, 1)
    assert back.dtype == array.dtype and back.flags.writeable
    np.testing.assert_array_equal(back, array)


@tables.cases(
    "state, where",
    ({"a": [1, {2}]}, r"data\['a'\]\[1\] is a builtins.set"),
    ({"a": jnp.ones(1)}, r"data\['a'\] is a jax"),
    (np.array([object()]), "data is a numpy.ndarray"),
    ({object(): 1}, "data, key .* is a builtins.object"),
)
def test_anything_else_is_refused_by_name(state, where):
    with pytest.raises(TypeError, match=where):
        data_states.to_json("data", Iterator(state))


def test_each_process_gets_its_own_state(tmp_path):
    assert data_states.from_json("data", stored(tmp_path, [10, 20, 30]), 1, 3) == 20


def test_other_process_count_is_one_clear_error(tmp_path):
    folder = stored(tmp_path, [10, 20])
    message = "saved by 2 processes", "but 4 are running now"
    with raises(errors.CheckpointError, *message):
        data_states.from_json("data", folder, 0, 4)


def test_equal_states_serve_any_number_of_processes(tmp_path):
    assert data_states.from_json("data", stored(tmp_path, [10, 10]), 3, 4) == 10


def test_objects_of_ours_are_no_iterators():
    class Model(nnx.Module):
        get_state = set_state = lambda self: None

    assert data_states.is_iterator(Iterator(0))
    assert not data_states.is_iterator(Model()) and not data_states.is_iterator([1])
