"""`nnx.training.RunLog`: the rows that are on disk, above all after a kill."""

import csv
import errno
import glob
import io
import json
import math
import os
import struct
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from graftree import errors
from tests import interpreters, tables
from tests.stress import starts

RunLog = nnx.training.RunLog
KINDS = pytest.mark.parametrize("kind", ["csv", "jsonl"])


def rows_of(path):
    """The rows of a file, as its readers have them: (step, numbers by name)."""
    if path.suffix == ".jsonl":
        rows = [json.loads(line) for line in path.read_text().splitlines()]
    else:
        with open(path, newline="") as file:
            rows = [
                {name: float(x) for name, x in row.items() if x}
                for row in csv.DictReader(file)
            ]
    return [(row.pop("step"), row) for row in rows]


def write_rows(log, *steps):
    for step in steps:
        log.write(step, metrics_of(step))


def metrics_of(step):
    """Metrics of which one comes later, and one only sometimes."""
    late = {"late": -step} if step > 4 else {}
    odd = {'odd, "name"': step / 3} if step % 3 == 1 else {}
    return {"loss": jnp.array(1 / step), **odd, **late}


# ------------------------------------------------------------------------- rows


@KINDS
def test_a_row_has_the_exact_numbers_of_its_step(tmp_path, kind):
    path = tmp_path / "new" / f"run.{kind}"
    metrics = {
        "float32": jnp.array(0.1),
        "bfloat16": jnp.array(0.1, jnp.bfloat16),
        "float8": jnp.array(0.3, jnp.float8_e4m3fn),
        "numpy": np.float64(0.1),
        "int": 2**53 + 2,
        "int4": jnp.array(-3, jnp.int4),
        "nan": jnp.array(jnp.nan),
        "inf": -np.inf,
    }
    with RunLog(path) as log:
        log.write(3, metrics)
    [(step, row)] = rows_of(path)
    assert step == 3 and [*row] == [*metrics]
    for name, value in metrics.items():
        assert np.array_equal(row[name], float(np.asarray(value)), equal_nan=True), name


@KINDS
def test_names_of_nested_metrics_are_joined(tmp_path, kind):
    metrics = nnx.MultiMetric(
        loss=nnx.metrics.Average("loss"), spread=nnx.metrics.Welford("loss")
    )
    metrics.update(loss=jnp.array([1.0, 3.0]))
    with RunLog(tmp_path / f"run.{kind}") as log:
        count = nnx.Variable(jnp.array(2), ref=True)
        log.write(1, {"train": metrics.compute(), "none": None, "n": count})
    [(_, row)] = rows_of(tmp_path / f"run.{kind}")
    deviation = "train/spread/standard_deviation"
    assert row["train/loss"] == 2 and row["n"] == 2 and row[deviation] == 1
    assert len(row) == 5


def test_a_new_name_is_a_new_column_of_the_table(tmp_path):
    path = tmp_path / "run.csv"
    with RunLog(path) as log:
        log.write(1, {})
        log.write(2, {"b": 0.5})
        log.write(3, {"a, b": 1})
        log.write(4, {"b": math.nan})
    text = 'step,b,"a, b"\n1,,\n2,0.5,\n3,,1\n4,nan,\n'
    assert path.read_text() == text and os.listdir(tmp_path) == ["run.csv"]


WRONG = [
    (2, {"loss": 1.0}, ValueError, "step 2 does not come after step 2.*\n.*one call"),
    (1, {"loss": 1.0}, ValueError, "step 1 does not come after step 2"),
    (3, {"loss": "low"}, TypeError, "'loss' should be a number .* got a str"),
    (3, {"a": {"b": jnp.ones(3)}}, TypeError, r"'a/b' .* got float32\[3\]"),
    (3, {"loss": 1j}, TypeError, "got a complex"),
    (3, {"ok": True}, TypeError, "'ok' should be a number"),
    (3, {"key": jax.random.key(0)}, TypeError, "'key' should be a number"),
    (3, {"step": 1}, ValueError, "'step' can't be the name"),
    (3, {"a/b": 1, "a": {"b": 2}}, ValueError, "'a/b' can't be the name.*\n"),
    (3, {"a\nb": 1}, ValueError, "can't be the name"),
    (3, 0.5, ValueError, "'' can't be the name.*\n.*a dict"),
]


@tables.cases("step, metrics, kind, message", *WRONG)
def test_what_is_no_row_is_refused_and_changes_nothing(
    tmp_path, step, metrics, kind, message
):
    with RunLog(tmp_path / "run.csv") as log:
        log.write(2, {"loss": 0.5})
        with pytest.raises(kind, match=f"(?s)RunLog.write.*{message}"):
            log.write(step, metrics)
        log.write(3, {"loss": 0.25})
    assert rows_of(tmp_path / "run.csv") == [(2, {"loss": 0.5}), (3, {"loss": 0.25})]


def test_a_traced_value_is_refused(tmp_path):
    with RunLog(tmp_path / "run.csv") as log:
        with pytest.raises(TypeError, match="'loss' is traced.*\nReturn it"):
            jax.jit(lambda x: log.write(1, {"loss": x}))(1.0)
        log.write(1, {"loss": 1})


# ----------------------------------------------------------------- values of the device


MOST_PENDING = 100  # rows; after that, write waits for the first of them


class Slow:
    """Stands for a value that the device computes until it is told to finish."""

    def __init__(self, monkeypatch):
        self.is_done = False
        monkeypatch.setattr(type(jnp.ones(())), "is_ready", lambda _: self.is_done)


def test_write_waits_for_no_value_and_keeps_the_order(tmp_path, monkeypatch):
    path, slow = tmp_path / "run.jsonl", Slow(monkeypatch)
    with RunLog(path) as log:
        write_rows(log, 1, 2, 3)
        assert rows_of(path) == []
        slow.is_done = True
        write_rows(log, 4)
        assert [step for step, _ in rows_of(path)] == [1, 2, 3, 4]
        slow.is_done = False
        write_rows(log, 5)
        log.flush()
        assert [step for step, _ in rows_of(path)] == [1, 2, 3, 4, 5]
        write_rows(log, *range(6, 6 + MOST_PENDING + 7))
        assert len(rows_of(path)) == 5 + 7
    assert len(rows_of(path)) == 5 + 7 + MOST_PENDING


def test_a_donated_value_is_named(tmp_path, monkeypatch):
    slow = Slow(monkeypatch)
    with RunLog(tmp_path / "run.csv") as log:
        count = jnp.array(2)
        log.write(1, {"count": count})
        jax.jit(lambda x: x + 1, donate_argnums=0)(count)
        slow.is_done = True
        with pytest.raises(RuntimeError, match="'count' of step 1 .*\n.*jnp.copy"):
            log.write(2, {"loss": 0.5})
        log.write(3, {"loss": 0.25})
    assert [step for step, _ in rows_of(tmp_path / "run.csv")] == [2, 3]


# ------------------------------------------------------------------- resumed runs

LAST, EVERY = 11, 3


class Weights:
    """A data iterator that stands for all else that is saved."""

    def __init__(self):
        self.step = 0

    def get_state(self):
        return self.step

    def set_state(self, state):
        self.step = state


def train(folder, kind, last=LAST, **options):
    """A user's loop: goes on after the latest checkpoint, or begins."""
    run = {
        "log": RunLog(folder / f"run.{kind}", resume=True, **options),
        "weights": Weights(),
    }
    with run["log"], nnx.checkpoints.Checkpoints(folder / "steps", every=3) as kept:
        step = kept.restore_latest(**run) or 0
        while step < last:
            step += 1
            run["weights"].step = step
            write_rows(run["log"], step)
            kept.save(step, **run)


@KINDS
@pytest.mark.parametrize("killed_at", [0, 1, 2, 4, 5, 6, 8, 11])
def test_a_resumed_run_has_the_rows_of_the_unbroken_one(tmp_path, kind, killed_at):
    train(tmp_path / "unbroken", kind)
    expected = (tmp_path / "unbroken" / f"run.{kind}").read_bytes()
    train(tmp_path / "run", kind, last=killed_at)
    train(tmp_path / "run", kind)
    assert (tmp_path / "run" / f"run.{kind}").read_bytes() == expected


@KINDS
def test_half_a_row_is_dropped_wherever_it_was_cut(tmp_path, kind):
    train(tmp_path, kind)
    path = tmp_path / f"run.{kind}"
    whole = path.read_bytes()
    rows = whole.splitlines(keepends=True)
    last_saved = len(b"".join(rows[: len(rows) - LAST % EVERY]))
    for size in (*range(last_saved, len(whole), 6), len(whole) - 1):
        path.write_bytes(whole[:size])
        train(tmp_path, kind)
        assert path.read_bytes() == whole
    path.write_bytes(whole[:last_saved] + b"\0" * 50 + b"\n7,{\n")
    train(tmp_path, kind)
    assert path.read_bytes() == whole


@KINDS
def test_without_a_checkpoint_the_run_begins_anew(tmp_path, kind):
    path = tmp_path / f"run.{kind}"
    train(tmp_path, kind, last=2)
    content = path.read_bytes()
    for size in range(len(content) + 1):
        path.write_bytes(content[:size])
        train(tmp_path, kind, last=2)
        assert path.read_bytes() == content


@KINDS
def test_a_restored_earlier_step_cuts_with_the_next_row(tmp_path, kind):
    path = tmp_path / f"run.{kind}"
    with (
        RunLog(path) as log,
        nnx.checkpoints.Checkpoints(tmp_path / "a", keep=None) as kept,
    ):
        for step in range(1, 7):
            write_rows(log, step)
            kept.save(step, log=log)
        content = path.read_bytes()
        kept.restore(2, log=log)
        log.flush()
        assert path.read_bytes() == content  # what fails after it can be undone
        log.write(3, {"loss": 9.0})
        with pytest.raises(ValueError, match="does not come after step 3"):
            write_rows(log, 3)
    rows = [(step, {"loss": float(row["loss"])}) for step, row in rows_of(path)]
    assert rows == [(1, {"loss": 1.0}), (2, {"loss": 0.5}), (3, {"loss": 9.0})]


def test_a_failed_restore_leaves_the_log(tmp_path):
    class Broken(Weights):
        def set_state(self, state):
            if self.step != state:
                raise KeyError(state)

    path, weights = tmp_path / "run.csv", Broken()
    with RunLog(path) as log, nnx.checkpoints.Checkpoints(tmp_path / "a") as kept:
        write_rows(log, 1)
        kept.save(1, log=log, z=weights)
        write_rows(log, 2)
        weights.step = 2
        with pytest.raises(KeyError):
            kept.restore(1, log=log, z=weights)
        write_rows(log, 3)
    assert [step for step, _ in rows_of(path)] == [1, 2, 3]


def test_the_log_of_another_run_does_not_fit_a_checkpoint(tmp_path):
    train(tmp_path, "csv")
    (tmp_path / "run.csv").write_text("step,loss\n1,0.5\n4,0.25\n")
    with pytest.raises(errors.CheckpointError, match=r"row for step 9.*\n.*log=None"):
        train(tmp_path, "csv")
    assert (tmp_path / "run.csv").read_text() == "step,loss\n1,0.5\n4,0.25\n"


def test_no_kill_loses_or_damages_a_row():
    printed = interpreters.printed("-W", "ignore", "-m", "tests.stress.log_kills", "7")
    assert [line.split()[1] for line in printed.splitlines()] == ["csv", "jsonl"]


# ----------------------------------------------------------------- two runs in one file


@KINDS
def test_rows_of_another_run_are_never_mixed_in(tmp_path, kind):
    path = tmp_path / f"run.{kind}"
    with RunLog(path) as log:
        write_rows(log, 1, 5)
        log.flush()
        for options in ({}, {"resume": True}):
            with pytest.raises(BlockingIOError, match="another RunLog is writing"):
                RunLog(path, **options)
        write_rows(log, 6)
    content = path.read_bytes()
    with pytest.raises(FileExistsError, match=r"3 rows, up to step 6.\n.*resume=True"):
        RunLog(path)
    assert path.read_bytes() == content
    RunLog(path, resume=True).close()
    assert path.read_bytes() == content


@pytest.mark.filterwarnings("ignore:os.fork")  # JAX warns: it has threads
def test_a_fork_does_not_keep_the_file(tmp_path):
    log = RunLog(tmp_path / "run.csv")
    write_rows(log, 1)
    ready, end = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.write(ready[1], b".")
        os.read(end[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    log.close()
    RunLog(tmp_path / "run.csv", resume=True).close()
    os.write(end[1], b".")
    os.waitpid(child, 0)


@tables.cases(
    "name, content, message",
    ("run.csv", "stepsize,loss\n", "is not a log.\nChoose"),
    ("run.jsonl", '{"loss": 1, "step": 1}\n', "is not a log.\nChoose"),
    ("run.txt", "", r"expects .* \*.jsonl or \*.csv, got '.*run.txt'"),
    ("run", "", r"expects the path of a local file"),
)
def test_a_file_of_something_else_is_left_alone(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_text(content)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"RunLog:? .*{message}"):
            RunLog(path, resume=True)
    assert path.read_text() == content
    with pytest.raises(ValueError, match="expects the path of a local file"):
        RunLog("gs://bucket/run.csv")


# ---------------------------------------------------------------- disks, ends


@KINDS
def test_a_full_disk_leaves_whole_rows_and_a_later_call_writes_the_rest(
    tmp_path, monkeypatch, kind
):
    path, write = tmp_path / f"run.{kind}", os.write
    with RunLog(path) as log:
        write_rows(log, 1)
        log.flush()
        content = path.read_bytes()

        def fail(descriptor, data):
            if write(descriptor, data[:5]) == 5:
                monkeypatch.setattr(os, "write", refuse)
            return 5

        def refuse(descriptor, data):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "write", fail)
        with pytest.raises(OSError, match="No space"):
            log.write(5, metrics_of(5))
            log.flush()
        with pytest.raises(OSError, match="No space"):
            log.get_state()
        assert path.read_bytes() == content
        monkeypatch.undo()
    assert [step for step, _ in rows_of(path)] == [1, 5]


def test_a_deleted_file_is_an_error_before_the_checkpoint(tmp_path):
    log = RunLog(tmp_path / "run.csv")
    write_rows(log, 1)
    os.remove(tmp_path / "run.csv")
    with nnx.checkpoints.Checkpoints(tmp_path / "steps") as kept:
        with pytest.raises(FileNotFoundError, match="run.csv was deleted .*\n"):
            kept.save(1, log=log)
        assert kept.steps() == []
    with pytest.raises(FileNotFoundError):
        log.close()
    with pytest.raises(ValueError, match="RunLog.write: this RunLog has been closed"):
        log.write(2, {})


def test_an_error_of_the_loop_is_not_hidden_by_one_of_the_log(tmp_path):
    with pytest.raises(KeyError) as caught, RunLog(tmp_path / "run.csv"):
        os.remove(tmp_path / "run.csv")
        raise KeyError("x")
    assert "was deleted" in caught.value.__notes__[0]


def test_a_program_that_ends_without_closing_keeps_its_rows(tmp_path):
    program = f"""if True:
        import graftree as nnx, jax.numpy as jnp
        log = nnx.training.RunLog({str(tmp_path / "run.csv")!r})
        log.write(1, {{"loss": jnp.array(0.5)}})
        del log
        1 / 0
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True)
    assert done.stderr.endswith(b"ZeroDivisionError: division by zero\n")
    assert rows_of(tmp_path / "run.csv") == [(1, {"loss": 0.5})]


def test_other_processes_than_the_first_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with RunLog(tmp_path / "run.csv", tensorboard=tmp_path / "tb", total=3) as log:
        write_rows(log, 1, 2)
        assert log.get_state() == {"step": 2}
        log.set_state({"step": 1})
        write_rows(log, 2)
        with pytest.raises(ValueError, match="step 2 does not come after"):
            write_rows(log, 2)
    assert os.listdir(tmp_path) == []


@pytest.mark.long
def test_two_processes_keep_one_log(tmp_path):
    options = ["--processes", 2, "--port", starts.free_port()]
    program = ["tests.training.logs_of_processes", tmp_path, *options]
    record = starts.start([[*program, "--process", i] for i in range(2)])
    record.check(0)
    mean = (0 + 1 + 10 + 11 + 12) / 5
    means = [float(record.last("loss", i)) for i in range(2)]
    assert means == pytest.approx([mean, mean])
    rows = [(step, {"loss": pytest.approx(mean)}) for step in (1, 2)]
    assert rows_of(tmp_path / "run.csv") == rows
    assert {*os.listdir(tmp_path)} == {"run.csv", "steps"}


# ------------------------------------------------------------------------- TensorBoard


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def event_pb2():
    return pytest.importorskip("tensorboardX").proto.event_pb2


def events_in(folder, event_pb2):
    """Reads event files as TensorBoard does: by name; a start hides what it purges."""
    values = {}
    for name in sorted(os.listdir(folder)):
        data = (folder / name).read_bytes()
        while len(data) >= 12:
            (size,) = struct.unpack("<Q", data[:8])
            if len(data) < 16 + size:
                break  # cut off
            event = event_pb2.Event.FromString(data[12 : 12 + size])
            data = data[16 + size :]
            if event.HasField("session_log"):
                kept = {key: x for key, x in values.items() if key[0] < event.step}
                values = kept
            for value in event.summary.value:
                values[event.step, value.tag] = value.simple_value
    return values


def wanted_events(*steps):
    return {
        (step, name): np.float32(value)
        for step in steps
        for name, value in metrics_of(step).items()
    }


@pytest.mark.parametrize("killed_at", [0, 2, 7])
def test_tensorboard_shows_the_rows_of_the_unbroken_run(tmp_path, event_pb2, killed_at):
    events = tmp_path / "events"
    train(tmp_path, "csv", last=killed_at, tensorboard=events)
    for name in glob.glob("events/*", root_dir=tmp_path):  # cut off by the kill
        with open(tmp_path / name, "ab") as file:
            file.write(struct.pack("<Q", 500) + b"half a record")
    train(tmp_path, "csv", tensorboard=events)
    assert events_in(events, event_pb2) == wanted_events(*range(1, LAST + 1))


def test_tensorboard_has_what_is_no_number(tmp_path, event_pb2, caplog):
    with RunLog(tmp_path / "run.csv", tensorboard=tmp_path / "events") as log:
        log.write(1, {"nan": jnp.nan, "inf": -np.inf, "large": 1e300})
    values = events_in(tmp_path / "events", event_pb2)
    assert math.isnan(values[1, "nan"]) and values[1, "inf"] == -np.inf
    assert not caplog.records


def test_events_of_another_run_are_never_mixed_in(tmp_path, event_pb2):
    options = {"tensorboard": tmp_path / "events"}
    with RunLog(tmp_path / "a.csv", **options) as log:
        write_rows(log, 1)
    for _ in range(2):
        with pytest.raises(FileExistsError, match=r"(?s)events of another.*choose"):
            RunLog(tmp_path / "b.csv", **options)


@tables.cases(
    "options, missing, way_out",
    ({"tensorboard": "events"}, "tensorboardX", "pip install tensorboardX"),
    ({"total": 3}, "rich.progress", "pip install rich"),
)
def test_a_missing_package_is_named(tmp_path, monkeypatch, options, missing, way_out):
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.setattr(sys, "stdout", Terminal())
    with pytest.raises(ImportError, match=f"RunLog.*not installed: {way_out}"):
        RunLog(tmp_path / "run.csv", **options)
    assert os.listdir(tmp_path) == []


# ---------------------------------------------------------------------------- progress


def test_progress_is_shown_in_a_terminal(tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    for _ in range(2):
        train(tmp_path, "csv", last=7, total=20)
    assert "7/20" in terminal.getvalue() and "loss 0.1429" in terminal.getvalue()


def test_without_a_terminal_nothing_is_shown(tmp_path, monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    with RunLog(tmp_path / "run.csv", total=3) as log:
        write_rows(log, 1, 2)
    assert capfd.readouterr() == ("", "")
