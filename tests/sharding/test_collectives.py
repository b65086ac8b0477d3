"""Several processes act together: all go on, or all raise (real processes, issue 52).

`joint_calls` is what they run. Here is what each of them must say.
"""

import json
import sys

import pytest

from tests.sharding import joint_calls
from tests.sharding.joint_calls import collectives

SOON = 20.0  # seconds, on a busy machine

# The words of the error where a call fails, and the type of the error in all.
REFUSED = {
    "save": ("TypeError", "wrong has the dtype"),
    "save_to_disk": ("CheckpointError", "No space left"),
    "overwrite": ("CheckpointError", "No space left"),
    "restore": ("StateMismatchError", "shape: up: float32"),
    "read": ("CheckpointError", "Input/output error"),
    "save_step": ("TypeError", "model: x has the dtype"),
    "save_score": ("ValueError", "the score 'loss' is missing"),
    "save_position": ("TypeError", "data['at'] is a builtins.object"),
    "save_other_scores": ("ValueError", "scores differ between the processes"),
    "write_step": ("CheckpointError", "No space left"),
    "restore_latest": ("StateMismatchError", "shape: model/up: float32"),
    "restore_position": ("KeyError", "no such position"),
    "steps": ("PermissionError", "Permission denied"),
    "fetch": ("ValueError", "donated or deleted"),
    "fetch_other": ("ValueError", "ask for different arrays"),
    "global_batch": ("ValueError", "x has 3 rows in this process"),
    "global_batch_of_other_size": ("ValueError", "have different rows"),
    "save_weights": ("ValueError", "'none'"),
    "write_weights": ("OSError WeightsError", "No space left"),
}
# The processes compare what they have: none of them is at fault.
COMPARED = {"save_other_scores", "fetch_other", "global_batch_of_other_size"}


def test_the_table_has_every_call():
    assert [*REFUSED] == joint_calls.ALL


def check_refused(said, fault, names):
    for process, calls in enumerate(said):
        for name in names:
            types, words = REFUSED[name]
            kind, text, seconds = calls[f"{name} {fault}"]
            assert kind and kind in types, (name, process, kind, text)
            assert words in text, (name, process, text)
            is_told = process != fault and name not in COMPARED
            assert (f"failed in process {fault}" in text) == is_told, (name, text)
            assert seconds < SOON, (name, process, seconds)
            # Nobody has lost count: the next one works.
            assert calls[f"{name} {fault} again"][:2] == ["", ""], (name, process)


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.long)])
def test_what_fails_in_one_process_fails_in_all_and_the_next_call_works(
    tmp_path, count
):
    said, record = joint_calls.run("refused", tmp_path, count)
    record.check(0)
    check_refused(said, count - 1, joint_calls.ALL)
    check_refused(said, 0, joint_calls.ALL)


@pytest.mark.long
@pytest.mark.parametrize("count", [2, 3])
def test_different_calls_name_themselves_and_who_has_ended_is_not_waited_for(
    tmp_path, count
):
    said, record = joint_calls.run("apart", tmp_path, count, joint_calls.MAIN)
    last = count - 1
    assert record.codes[last] == 1, record.errors[last]
    assert "no more data" in record.errors[last]
    for calls in said:
        for case, own, other in [
            ("other step", "Checkpoints.save(2)", "Checkpoints.save(3)"),
            ("other call", "Checkpoints.steps", "nnx.sharding.fetch"),
        ]:
            kind, text, _ = calls[case]
            assert kind == "ProcessError", text
            assert (
                f"process 0: {own}\n" in text and f"process {last}: {other}\n" in text
            )
            assert calls[f"{case} again"][:2] == ["", ""], calls
        # Another thread was ahead of one process, and behind the other.
        assert calls["beside a thread"][:2] == ["", ""] and "thread" in calls
    for calls in said[:-1]:
        for name in joint_calls.MAIN:
            kind, text, seconds = calls[name]
            assert kind == "ProcessError" and seconds < SOON, (name, text, seconds)
            words = f"process {last} has ended with ValueError: no more data"
            assert words in text, (name, text)


@pytest.mark.long
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("name", joint_calls.MAIN)
def test_a_killed_process_ends_the_others_within_a_bound(tmp_path, name, count):
    """JAX ends them; our log says what they were waiting for."""
    said, record = joint_calls.run("killed", tmp_path, count, [name])
    assert record.codes[-1] == -9
    for process in range(count - 1):
        assert record.codes[process] not in (0, "stuck"), record.errors[process]
        told = record.errors[process]
        is_raised = name in said[process] and said[process][name][0]
        is_ended = "detected fatal errors" in told
        assert is_raised or is_ended, told
        assert is_raised or f"Process {process} waits in " in told, told


# ---------------------------------------------------------------- one process


def test_one_process_asks_nobody(monkeypatch):
    monkeypatch.setattr(collectives, "_Meeting", None)
    assert collectives.gathered("a", lambda: (1, 2)) == [(1, 2)]
    assert collectives.by_first("a", lambda: [3]) == [3]
    marker = object()
    assert collectives.together("a", lambda: marker) is marker
    with pytest.raises(KeyError, match="own"):
        collectives.together("a", lambda: {}["own"])


def test_an_error_of_another_process_has_the_same_type_where_it_can():
    make = collectives._same_error
    assert type(make("call", 1, "builtins", "OSError", "full")) is OSError
    error = make("call", 1, "graftree.errors", "StateMismatchError", "misfit")
    assert str(error) == "call failed in process 1: StateMismatchError: misfit"
    for module, kind in [
        ("builtins", "KeyboardInterrupt"),
        ("builtins", "UnicodeDecodeError"),  # made of five things
        ("builtins", "print"),
        ("a.users", "Error"),
    ]:
        error = make("call", 1, module, kind, "why")
        assert type(error).__name__ == "ProcessError", kind
        assert f"{kind}: why" in str(error)


def test_a_program_that_ends_well_says_only_that(monkeypatch):
    for name in "last_exc", "last_value":
        monkeypatch.setattr(sys, name, None, raising=False)
    assert collectives._last_words() == "has ended"
    monkeypatch.setattr(sys, "last_value", ValueError("no data"), raising=False)
    assert collectives._last_words() == "has ended with ValueError: no data"


# ---------------------------------------------------------------- without a store


def test_without_a_store_processes_agree_through_their_devices(monkeypatch):
    """As `_jax_names` has it: JAX may move the name of the store."""
    monkeypatch.setattr(collectives.jax, "process_count", lambda: 2)
    monkeypatch.setattr(collectives._jax_processes, "store", lambda: None)
    other = json.dumps(["call", 5, None, True])
    monkeypatch.setattr(collectives, "_through_devices", lambda own: [own, other])
    assert collectives.gathered("call", lambda: 4) == [4, 5]
    with pytest.raises(collectives.errors.ProcessError, match="process 1: call"):
        collectives.gathered("another", lambda: 4)
