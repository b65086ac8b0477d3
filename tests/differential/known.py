"""Differences from plain Python that are by design; kinds of those of the peer."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from tests.differential.running import GRAPH_UPDATES


class ByDesign(NamedTuple):
    """A difference that is meant.

    Attributes:
        reason: Why; also under which heading it is counted.
        holds: Of a program, a mode and a difference, whether this is it.
    """

    reason: str
    holds: Callable[[Any, str, Any], bool]


BY_DESIGN: list[ByDesign] = []


def reason(program, mode, found):
    """Why a difference of the library from plain Python is meant, if it is."""
    reasons = (known.reason for known in BY_DESIGN if known.holds(program, mode, found))
    return next(reasons, None)


def peer_kind(program, mode, found):
    """What the peer did otherwise than plain Python, in a few words."""
    number, what, text = found
    called = re.findall(r"show\(\w*?([a-z_]+)\d*\(", program.statements[number])
    traits = sorted(program.traits) if mode == GRAPH_UPDATES else []
    calls = [trait for trait in traits if trait.startswith("call")]
    error = re.sub(r".*expected '(.*)', got '(.*)'", r"\1/\2", text)
    detail = error if what == "error" else ""
    return " ".join([mode, *(calls or called or ["a change"]), what, detail]).strip()
