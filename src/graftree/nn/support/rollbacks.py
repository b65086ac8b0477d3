"""Calls that fail leave state as it was, where a layer has to write before it knows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from graftree import _jax
from graftree.core.rng.streams import RngStream
from graftree.core.variables import variables
from graftree.core.variables.variables import Variable


@contextlib.contextmanager
def undone_on_failure(*state: Any) -> Iterator[None]:
    """Gives Variables, and counts of streams, their values back if the block fails.

    A layer checks first and writes last where it can. It cannot if it hands its state
    to a function of the user, or to another layer.
    """
    counts = [stream.count for stream in state if isinstance(stream, RngStream)]
    boxes = [*counts, *(leaf for leaf in state if isinstance(leaf, Variable))]
    before = [_content(variable) for variable in boxes]
    try:
        yield
    except BaseException:
        # What may not be written now was not written in the block.
        changed = [
            (variable, content)
            for variable, content in zip(boxes, before, strict=True)
            if variables.may_write(variable) and _content(variable) is not content
        ]
        variables.store_all([v for v, _ in changed], [x for _, x in changed])
        raise


def _content(variable: Variable[Any]) -> Any:
    """What is stored, past all hooks, which would change it on its way back."""
    raw = variable.get_raw_value()
    # A trace that fails drops its writes; reading would be one operation more.
    is_eager_ref = _jax.is_ref(raw) and not isinstance(raw, _jax.Tracer)
    return raw[...] if is_eager_ref else raw
