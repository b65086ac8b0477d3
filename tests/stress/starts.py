"""Child processes which say what they do, and are killed where it was decided.

`start` runs a program of this folder until it ends, or until a line of its output says
that the moment has come. What it printed is the whole record: words, a line each.
"""

import contextlib
import dataclasses
import functools
import itertools
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

from tests import interpreters

# A process that is stuck fails the run, with the lines so far. Gloo needs a minute to
# notice that a neighbour is gone.
PATIENCE = 180.0


@dataclasses.dataclass(frozen=True)
class Moment:
    """When to send a signal: ``delay`` seconds after the first line of some words.

    Attributes:
        line: Words of a line; of several processes the first to print it counts.
        delay: Seconds to wait then.
        send: The signal, to all processes.
    """

    line: str
    delay: float = 0.0
    send: signal.Signals = signal.SIGKILL


@dataclasses.dataclass
class Record:
    """What the processes of one start printed, and how they ended."""

    lines: list[list[list[str]]]
    codes: list[int]
    errors: list[str]
    sent: bool

    def _of(self, word, process):
        return [line[1:] for line in self.lines[process] if line[0] == word]

    def values(self, word, process=0):
        """The lines that start with ``word``, without it, by their first number."""
        return {int(number): rest for number, *rest in self._of(word, process)}

    def last(self, word, process=0):
        """What follows ``word`` in its last line; ``None`` without one."""
        return next((" ".join(x) for x in self._of(word, process)[::-1]), None)

    def check(self, *codes):
        """Raises, with what was printed, unless each process ended with such a code."""
        if not {*self.codes} <= {*codes}:
            text = [f"exit {self.codes}, expected {codes}", *self.errors]
            text += [" ".join(line) for lines in self.lines for line in lines[-5:]]
            raise AssertionError("\n".join(text))


def tell(*words):
    """Prints a line at once: the process may not live to print more."""
    print(" ".join(map(str, words)), flush=True)


def killed_at(number, function, watched, in_writes=False):
    """Whether a call came to an operation of that number, and was killed there.

    Args:
        number: Of the operations of the call, from 1.
        function: What a fork of this process calls.
        watched: The operations on files that count, as audit events.
        in_writes: Whether a write counts, too: before it, and when half is on disk.
    """
    child = os.fork()
    if not child:
        numbers = itertools.count(1)

        def count():
            if next(numbers) == number:
                os._exit(9)

        if in_writes:
            os.write = functools.partial(_write_half, os.write, count)
        sys.addaudithook(lambda event, _: event in watched and count())
        function()
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 9), f"it failed: {code}"
    return code == 9


def _write_half(write, count, descriptor, data):
    count()
    half = write(descriptor, data[: (len(data) + 1) // 2])
    count()
    return half


def free_port():
    """A port of this machine that nobody listens on."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def start(commands, moment=None, patience=PATIENCE):
    """Runs modules, each with its arguments, at the same time, until all have ended."""
    end, seen = time.monotonic() + patience, queue.SimpleQueue()
    lines = [[] for _ in commands]
    with contextlib.ExitStack() as opened:
        errors = [opened.enter_context(tempfile.TemporaryFile("w+")) for _ in commands]
        processes = [
            opened.enter_context(interpreters.start("-m", *command, stderr=file))
            for command, file in zip(commands, errors, strict=True)
        ]
        threads = [
            threading.Thread(target=_read, args=[process.stdout, of_process, seen])
            for process, of_process in zip(processes, lines, strict=True)
        ]
        for thread in threads:
            thread.start()
        sent = moment is not None and _wait_for(moment, seen, processes, end)
        codes = [_end(process, end) for process in processes]
        for thread in threads:
            thread.join()
        for file in errors:
            file.seek(0)
        return Record(lines, codes, [file.read()[-4000:] for file in errors], sent)


def _read(stream, lines, seen):
    for line in stream:
        # A process that is killed may leave half a line.
        if line.strip() and line.endswith("\n"):
            lines.append(line.split())
            seen.put(line)
    seen.put(None)


def _wait_for(moment, seen, processes, end):
    open_streams = len(processes)
    while open_streams:
        try:
            line = seen.get(timeout=max(0.1, end - time.monotonic()))
        except queue.Empty:
            return False
        if line is None:
            open_streams -= 1
        elif line.startswith(moment.line + " ") or line.strip() == moment.line:
            time.sleep(moment.delay)
            for process in processes:
                process.send_signal(moment.send)
            return True
    return False


def _end(process, end):
    try:
        return process.wait(max(0.1, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return "stuck"
