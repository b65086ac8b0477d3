"""Notices when JAX compiles a function again that it doesn't trace again.

It does so for arrays on other devices or with other shardings. Nothing of ours runs
then: JAX compiles what it traced before. But it tells listeners (``jax.monitoring``)
that it has compiled, in the thread of the call, while the call waits. So the call is
found on the stack. Calls that compile nothing pay nothing.
"""

from __future__ import annotations

import functools
from types import CodeType
from typing import Any

import jax

from graftree import _python
from graftree.transforms.crossing import packing

_EVENT = "/jax/core/compile/backend_compile_duration"


@functools.cache
def follow(*callers: CodeType) -> None:
    """Notes the placements of arrays for which calls were compiled.

    Args:
        *callers: The code of the methods that call what JAX compiled; they have
            ``self``, with the attribute ``traces``, and ``groups``.
    """

    def heed(event: str, duration_secs: float, **facts: Any) -> None:
        if event != _EVENT:
            return
        frame = _python.frame_above(1)
        while frame is not None:
            given = _python.locals_of(frame) if frame.f_code in callers else {}
            if "groups" in given:
                signature, values, _roles = packing.join(given["groups"])
                traces = given["self"].traces
                if traces is not None:  # a plan of what JAX does not compile
                    traces.add_placement(signature, values)
                return
            frame = frame.f_back

    jax.monitoring.register_event_duration_secs_listener(heed)
