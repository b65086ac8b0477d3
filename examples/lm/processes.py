"""One command, several processes: each has a part of the devices, as on a cluster.

The command starts itself again, once per process, on this machine. The processes find
each other through ``jax.distributed``, and the CPU simulates the devices of each. The
output of the first is shown; what they write to stderr is in ``process-N.log`` in the
output folder. When one dies, the others can't go on: they are ended within seconds, and
the same command goes on from the last checkpoint.
"""

import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from examples.command_lines import SIMULATED

# Tells a process which one it is: its number, how many there are, the port.
VARIABLE = "GRAFTREE_LM_PROCESS"
EACH = 4  # devices of a process, if nothing else is said

GRACE = 5.0  # seconds in which the others may end by themselves
STEP = 0.05  # seconds between two looks


def is_one_of_several() -> bool:
    """Whether this process was started by `run`."""
    return VARIABLE in os.environ


def join() -> None:
    """Joins the other processes; before JAX has done anything else."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's, who tells us
    _keep_stdout_for_python()
    import jax

    number, count, port = map(int, os.environ[VARIABLE].split("/"))
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        f"localhost:{port}",
        num_processes=count,
        process_id=number,
        initialization_timeout=60,
        heartbeat_timeout_seconds=20,
        shutdown_timeout_seconds=20,
    )


def _keep_stdout_for_python() -> None:
    """Sends what C++ prints, Gloo's greetings, to stderr."""
    mine = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = open(mine, "w", buffering=1, encoding=sys.stdout.encoding)  # noqa: SIM115


def _end_with_parent() -> None:
    # The parent never writes: this returns when it has died, however it did. Not by
    # `sys.stdin`, whose lock a thread must not hold while the interpreter ends.
    os.read(0, 1)
    os._exit(1)


def run(
    arguments: Sequence[str], count: int, devices: int, folder: pathlib.Path
) -> int:
    """Runs the command in several processes, until all have ended.

    Args:
        arguments: The options of the command, without ``--processes``.
        count: Number of processes.
        devices: Number of devices in all, a multiple of ``count``.
        folder: Where the messages of the processes go.

    Returns:
        The exit code: 0; 2 for a wrong option; 1, after one line on stderr, if one of
        them failed; 130 after Ctrl-C and 143 after SIGTERM, when all has been saved.
    """
    port = free_port()
    logs = [folder / f"process-{number}.log" for number in range(count)]
    processes: list[subprocess.Popen[bytes]] = []
    signals: list[int] = []

    def tell(number: int, _: object) -> None:
        signals.append(number)
        print("finishing the step in progress", file=sys.stderr)
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)

    before = {number: signal.signal(number, tell) for number in _STOPS}
    try:
        for number, log in enumerate(logs):
            place = f"{number}/{count}/{port}"
            processes.append(_start(arguments, place, devices // count, log))
        codes = _wait(processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for number, handler in before.items():
            signal.signal(number, handler)
    if signals and all(code == 128 + signal.SIGTERM for code in codes):
        return 128 + signals[0]
    return judge(codes, logs)


_STOPS = (signal.SIGINT, signal.SIGTERM)


def _start(
    arguments: Sequence[str], place: str, devices: int, log: pathlib.Path
) -> subprocess.Popen[bytes]:
    flags = f"{SIMULATED}={devices}"
    environment = {VARIABLE: place, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    is_first = place.startswith("0/")
    with log.open("wb") as messages:
        return subprocess.Popen(
            [sys.executable, "-m", "examples.lm", *arguments],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=None if is_first else subprocess.DEVNULL,
            stderr=messages,
            start_new_session=True,  # so that Ctrl-C reaches the parent only
        )


def _wait(processes: list[subprocess.Popen[bytes]]) -> list[int | None]:
    """The exit codes; ``None`` for those that went on when another one had failed."""
    end = float("inf")
    while time.monotonic() < end:
        codes = [process.poll() for process in processes]
        if None not in codes:
            break
        if end == float("inf") and any(codes):
            end = time.monotonic() + GRACE
        time.sleep(STEP)
    return [process.poll() for process in processes]


def judge(codes: list[int | None], logs: list[pathlib.Path]) -> int:
    """The exit code of the command; says which process failed, and how."""
    if codes[0] in (0, 2) and {*codes} == {codes[0]}:
        if codes[0]:  # a wrong option, which all have found
            print(_last_line(logs[0]), file=sys.stderr)
        return codes[0]
    # A process that was killed is the reason why others fail.
    killed = [number for number, code in enumerate(codes) if code and code < 0]
    failed = [number for number, code in enumerate(codes) if code]
    number = (killed or failed)[0]
    code = codes[number] or 0
    how = f"exit code {code}"
    if code < 0:
        how = f"killed by {signal.Signals(-code).name}"
    print(
        f"python -m examples.lm: error: process {number} ended ({how}), so all were "
        f"stopped; its messages are in {logs[number]}; the same command goes on from "
        "the last checkpoint",
        file=sys.stderr,
    )
    return 1


def _last_line(log: pathlib.Path) -> str:
    return log.read_text(errors="replace").strip().rpartition("\n")[2]


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]
