"""Is this program about to be stopped? Answered between steps, so that it can save.

Clusters send SIGTERM some time before they kill. With several processes, JAX finds a
step at which all of them stop; with one, the signal is noted here. Who never asks dies
of SIGTERM as ever: the handler is there from the first question on. It counts one
signal; the next one is for the handler that was there before.
"""

from __future__ import annotations

import signal
import threading
from typing import Any

import jax

from graftree import errors


class _Watch:
    """The handler of SIGTERM, shared by all who ask."""

    def __init__(self) -> None:
        self._askers: set[int] = set()
        self._previous: Any = None
        self._is_installed = False
        self.was_told = False

    def begin(self, asker: object) -> None:
        """Installs the handler, if nobody has."""
        if id(asker) in self._askers:
            return
        if not self._askers:
            self._install()
        self._askers.add(id(asker))

    def end(self, asker: object) -> None:
        """Puts back the handler that was there before, if nobody else asks."""
        self._askers.discard(id(asker))
        if not self._askers:
            self._put_back()
            self.was_told = False

    def _install(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                errors.message(
                    "Checkpoints.should_stop must be called in the main thread "
                    "first: only there can Python be told to note SIGTERM.",
                    way_out="Call it there once; after that any thread may.",
                )
            )
        self._previous = signal.signal(signal.SIGTERM, self._note)
        self._is_installed = True

    def _note(self, *_: Any) -> None:
        self.was_told = True
        self._put_back()

    def _put_back(self) -> None:
        if not self._is_installed:
            return
        is_main = threading.current_thread() is threading.main_thread()
        # Not if the program has installed another one meanwhile, or C code had one.
        if is_main and signal.getsignal(signal.SIGTERM) == self._note:
            previous = signal.SIG_DFL if self._previous is None else self._previous
            signal.signal(signal.SIGTERM, previous)
        self._is_installed = False


_watch = _Watch()


def should_stop(asker: object, step: int) -> bool:
    """Whether the program is to stop after this step.

    Args:
        asker: Who asks, until it calls `stop_asking`.
        step: The number of the step.
    """
    if jax.process_count() == 1:
        _watch.begin(asker)
        return _watch.was_told
    from jax.experimental import multihost_utils

    return bool(multihost_utils.reached_preemption_sync_point(step))


def stop_asking(asker: object) -> None:
    """Ends what the first question of an asker began."""
    _watch.end(asker)
