"""Lets the processes of one program act together: all go on, or all raise.

A process that fails alone, before the others wait for it, would leave them waiting. So
each function here is called by all processes, with a name that says which call it is.
Each of them does its part, and posts how that went:

    process 0    part done  ──post──┐                       ┌──▶ goes on, or raises
    process 1    part fails ──post──┼─▶ the first collects ─┤
    process 2    part done  ──post──┘                       └──▶ goes on, or raises

- One that fails raises its error and waits for nobody. The others raise an error of the
  same type, which says which process failed, and why.
- If the names differ, the program does different things in its processes: all raise.
- A program that ends leaves a note: nobody waits for it.
- Nobody waits longer than `LONGEST_WAIT`. JAX ends all processes if one is killed, some
  time after it noticed (``heartbeat_timeout_seconds`` of `jax.distributed.initialize`).

With one process, none of this does anything. The posts go through the store of
`jax.distributed`, not through the devices; if a JAX has no store, through these.

In the main thread, calls meet in their order. Those of other threads, such as one that
makes batches ahead, may come in any order: there, a call meets those of the same name.
"""

from __future__ import annotations

import builtins
import collections
import hashlib
import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from graftree import _jax_processes, _python, errors

T = TypeVar("T")

# In seconds. Processes may well be apart: one of them evaluates, compiles, deletes.
LONGEST_WAIT = 1800.0
# After this time a line in the log says who waits for whom.
PATIENCE = 30.0

_logger = logging.getLogger("graftree")


def is_first() -> bool:
    """Whether this process is the one that acts for all."""
    return jax.process_index() == 0


def gathered(
    name: str,
    act: Callable[[], Any],
    *,
    topic: str = "",
    among: Sequence[int] | None = None,
) -> list[Any]:
    """Runs a function in each process; returns all results, in their order.

    Args:
        name: The call, for messages; the same in all processes.
        act: What each process does; its result goes to the others as JSON.
        topic: Calls of other threads than the main one meet those of the same name and
            topic.
        among: The numbers of the processes that call it; ``None`` for all.

    Raises:
        Exception: The error of ``act``; or one of the same type, if it fails in another
            process.
        ProcessError: If a process does something else, has ended, or does not come.
    """
    members = [*range(jax.process_count())] if among is None else [*among]
    if len(members) == 1:
        return [act()]
    meeting = _Meeting(name, topic, members)
    try:
        value = act()
        report = json.dumps(_Posted(name, value))
    except BaseException as error:
        meeting.fail(error)
        raise
    return meeting.values(report)


def together(name: str, act: Callable[[], T]) -> T:
    """Has each process do something; returns its result once all have succeeded.

    Args:
        name: As for `gathered`.
        act: What it does.
    """
    results = list[T]()

    def act_here() -> None:
        results.append(act())

    gathered(name, act_here)
    return results[0]


def by_first(name: str, act: Callable[[], T]) -> T:
    """Has the first process do something; all get its result, or its error.

    Args:
        name: As for `gathered`.
        act: What it does; its result goes to the others as JSON.
    """
    return gathered(name, lambda: act() if is_first() else None)[0]


class Barriers:
    """Waits of a library that works for us in all processes, one after the other.

    Args:
        name: For messages; the same in all processes.
        topic: No two that are in use at the same time have the same one.
    """

    def __init__(self, name: str, topic: str) -> None:
        self._name, self._topic = name, topic

    def wait(self, *, key: str, timeout_ms: int) -> None:
        """Waits for all processes; raises if one of them fails."""
        del key, timeout_ms  # Orbax's words
        self.together(lambda: None)

    def together(self, act: Callable[[], None]) -> None:
        """Has each process do something, as the next wait."""
        if jax.process_count() > 1:
            _Meeting(self._name, self._topic, None).do(act)
        else:
            act()

    def fail(self, error: BaseException) -> None:
        """Tells the others that this process does not come to the next wait."""
        if jax.process_count() > 1:
            _Meeting(self._name, self._topic, None).fail(error)


# ---------------------------------------------------------------- one collective


class _Posted(NamedTuple):
    """What a process posts, as JSON.

    Attributes:
        name: The call.
        value: Its result.
        error: If it failed: the module and the name of the error's type, and its text.
        is_there: Whether it has come; if not, ``error`` says why.
        is_cause: Whether it failed by itself, not because another process had.
    """

    name: str
    value: Any = None
    error: Sequence[str] | None = None
    is_there: bool = True
    is_cause: bool = True


# How many collectives there were, by sequence. Calls meet by number.
_counts = collections.Counter[str]()
_counting = threading.Lock()


class _Meeting:
    """One collective: the reports of its members meet under one number.

    Args:
        name: The call.
        topic: See `gathered`.
        members: The numbers of the processes; ``None`` for all, in sequence by topic.
    """

    def __init__(self, name: str, topic: str, members: list[int] | None) -> None:
        everyone = [*range(jax.process_count())]
        self._name, self._members = name, members or everyone
        self._index = jax.process_index()
        in_order = threading.current_thread() is threading.main_thread()
        sequence = "" if in_order and members is not None else f"{name} {topic}"
        sequence += "" if self._members == everyone else f" {self._members}"
        with _counting:
            self._number = _counts[sequence]
            _counts[sequence] += 1
        digest = hashlib.sha256(sequence.encode()).hexdigest()[:12]
        self._sequence = f"graftree/{digest}"
        self._folder = f"{self._sequence}/{self._number}"
        self._store = _jax_processes.store()
        self._start = time.monotonic()
        self._has_logged = False

    def fail(self, error: BaseException) -> None:
        """Posts that this process failed; waits for nobody."""
        error_type = type(error)
        fields = error_type.__module__, error_type.__qualname__, str(error)
        is_cause = not _is_of_another(error)
        report = json.dumps(_Posted(self._name, error=fields, is_cause=is_cause))
        if self._store is None:
            _through_devices(report)
            return
        # An error here would hide the one that is raised.
        try:
            self._post(report)
            for earlier in self._earlier_failures():
                error.add_note(earlier)
        except jax.errors.JaxRuntimeError:
            _logger.debug("Could not post an error.", exc_info=True)

    def _earlier_failures(self) -> list[str]:
        """Describes the failures of others, which may be why this process failed."""
        store: Any = self._store
        lines = []
        for member in self._members:
            text = store.look(f"{self._folder}/{member}")
            report = _Posted(*json.loads(text)) if text else None
            is_other = member != self._index
            if is_other and report and report.error and report.is_cause:
                _, error_type, text = report.error
                lines.append(f"Process {member} has failed too: {error_type}: {text}")
        return lines

    def do(self, act: Callable[[], None]) -> None:
        """Does something, and waits until all have done it."""
        try:
            act()
        except BaseException as error:
            self.fail(error)
            raise
        self.values(json.dumps(_Posted(self._name)))

    def values(self, report: str) -> list[Any]:
        """Posts a report; returns the values of all members."""
        if self._store is None:
            texts = _through_devices(report)
        else:
            try:
                texts = self._collected(report)
            except jax.errors.JaxRuntimeError as error:
                first = str(error).partition("\n")[0]
                raise errors.ProcessError(
                    f"{self._name}: process 0, which coordinates the others, "
                    f"can't be reached: {first}\nIt was killed or has ended; see what "
                    "it printed."
                ) from error
        reports = [
            None if text is None else _Posted(*json.loads(text)) for text in texts
        ]
        self._check(reports)
        return [None if x is None else x.value for x in reports]

    def _collected(self, report: str) -> list[str | None]:
        """Collects the reports of all members; not all, if the first one has failed."""
        store: Any = self._store
        self._post(report)
        first, *others = self._members
        if self._index != first:
            return json.loads(self._awaited("all", first, LONGEST_WAIT + 2 * PATIENCE))
        texts: list[str | None] = [report]
        for member in others:
            remaining = LONGEST_WAIT - (time.monotonic() - self._start)
            texts.append(self._awaited(str(member), member, remaining))
        store.post(f"{self._folder}/all", json.dumps(texts))
        # All have come, so they have read the previous ones.
        store.drop(f"{self._sequence}/{self._number - 1}")
        return texts

    def _post(self, report: str) -> None:
        store: Any = self._store
        first = self._members[0]
        if self._index != first:
            store.post(f"{self._folder}/{self._index}", report)
        elif _Posted(*json.loads(report)).error:
            # It collects nothing: its error is the answer.
            nobody = [None] * (len(self._members) - 1)
            store.post(f"{self._folder}/all", json.dumps([report, *nobody]))

    def _awaited(self, entry: str, member: int, seconds: float) -> str:
        """Waits for what a member posts; if it does not, a report that says why."""
        store: Any = self._store
        key, end = f"{self._folder}/{entry}", time.monotonic() + seconds
        while True:
            # In short waits, so that Ctrl-C is heard.
            text = store.wait(key, 1.0)
            if text is None and (note := store.look(_note_of(member))) is not None:
                # It may have posted, and then have ended.
                text = store.look(key) or self._absence(member, entry, note)
            if text is None and time.monotonic() > end:
                minutes = round(seconds / 60)
                why = f"is {minutes} minutes late; it may be waiting elsewhere"
                text = self._absence(member, entry, why)
            if text is not None:
                return text
            self._log_wait(member)

    def _absence(self, member: int, entry: str, why: str) -> str:
        report = json.dumps(_Posted(self._name, None, ("", "", why), False))
        if entry != "all":
            return report
        texts: list[str | None] = [None] * len(self._members)
        texts[self._members.index(member)] = report
        return json.dumps(texts)

    def _log_wait(self, member: int) -> None:
        """Logs once that this process waits."""
        if not self._has_logged and time.monotonic() > self._start + PATIENCE:
            self._has_logged = True
            _logger.warning(
                "Process %d waits in %s for process %d.",
                self._index,
                self._name,
                member,
            )

    def _check(self, reports: Sequence[_Posted | None]) -> None:
        """Raises unless all members have done their part of the same call."""
        pairs = [
            (member, report)
            for member, report in zip(self._members, reports, strict=True)
            if report is not None
        ]
        for member, report in pairs:
            if report.error and not report.is_there:
                raise errors.ProcessError(
                    f"{self._name}: process {member} {report.error[-1]}.\nNo process "
                    "can continue: all must make the same calls in the same order."
                )
        for member, report in sorted(pairs, key=lambda pair: not pair[1].is_cause):
            if report.error:
                raise _same_error(report.name, member, *report.error)
        if len({report.name for _, report in pairs}) > 1:
            raise errors.ProcessError(
                errors.message(
                    "The processes of the program make different calls.",
                    where="\n".join(f"process {i}: {x.name}" for i, x in pairs[:20]),
                    way_out="All of them must make the same calls in the same order. "
                    "One may have skipped a step, or continued after an error.",
                )
            )


def _same_error(
    name: str, member: int, module: str, qualname: str, text: str
) -> Exception:
    """Makes an error like that of another process: ``except`` does the same in all."""
    message = f"{name} failed in process {member}: {qualname}: {text}"
    source = {"builtins": builtins, errors.__name__: errors}.get(module)
    error_type = getattr(source, qualname, None)
    # KeyboardInterrupt, for one, is not caught as others are.
    if not (isinstance(error_type, type) and issubclass(error_type, Exception)):
        error_type = errors.ProcessError
    try:
        error = error_type(message)
    except TypeError:  # UnicodeDecodeError, for one, is made of other things
        error = errors.ProcessError(message)
    vars(error)[_OF_ANOTHER] = True
    return error


# Marks errors that are those of another process.
_OF_ANOTHER = "_graftree_of_another"


def _is_of_another(error: BaseException | None) -> bool:
    """Whether an error, or one that caused it, is one of another process."""
    while error is not None:
        if _OF_ANOTHER in vars(error):
            return True
        error = error.__cause__
    return False


def _through_devices(report: str) -> list[str | None]:
    """Exchanges reports through the devices; without a limit of time."""
    from jax.experimental import multihost_utils

    data = report.encode()
    sizes = multihost_utils.process_allgather(np.asarray(len(data)))
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    rows = multihost_utils.process_allgather(padded)
    return [bytes(row[:size]).decode() for row, size in zip(rows, sizes, strict=True)]


# ---------------------------------------------------------------- the end of a process


def _note_of(member: int) -> str:
    return f"graftree/ended/{member}"


def _leave_note() -> None:
    """Tells those that may wait that this program has ended, and its last error."""
    try:
        store = _jax_processes.store() if jax.distributed.is_initialized() else None
        if store is not None:
            index = _jax_processes.own_number() or 0
            store.post(_note_of(index), _last_words())
    except Exception:  # a program that ends well must not seem to have failed
        _logger.debug("Could not tell of the end.", exc_info=True)


def _last_words() -> str:
    # Where Python keeps the error that ended the program; the first since 3.12.
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if error is None:
        return "has ended"
    return f"has ended with {type(error).__name__}: {error}"


# Before JAX ends its part, for which the processes wait for each other.
_python.register_before_threads_end(_leave_note)
