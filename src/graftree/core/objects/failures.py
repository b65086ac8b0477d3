"""What an exception in a method of a Pytree is told: which object, given what.

    at net.blocks[3].attn.query, a Linear
      inputs: float32[2, 5]
      Params: kernel float32[3, 4], bias float32[4]

It is one note (`BaseException.add_note`), about the innermost object.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from graftree.core.objects import bookkeeping
from graftree.core.objects.running import Frame
from graftree.core.variables.variables import Variable

_MOST = 8


class Note(str):
    """A note of ours; pickled as a string."""

    __slots__ = ()

    def __reduce__(self) -> Any:
        return str, (str(self),)


def explain(error: Exception, frame: Frame, method: Callable[..., Any]) -> None:
    """Adds the note, if there is none yet."""
    if not any(isinstance(note, Note) for note in getattr(error, "__notes__", ())):
        try:
            note = Note(_describe_call(frame, method))
        except Exception:  # what is wrong here may be the object itself
            note = Note(f"in a method of a {type(frame.module).__name__}")
        error.add_note(note)
        # Before what JAX notes on its traceback, which is longer and says less.
        error.__notes__.insert(0, error.__notes__.pop())


def _describe_call(frame: Frame, method: Callable[..., Any]) -> str:
    kind = type(frame.module).__name__
    is_told = frame.name == kind
    lines = [f"at {frame.name}" + f", {_article(kind)}" * (not is_told)]
    given = [f"{name}: {describe(x)}" for name, x in _arguments(frame, method).items()]
    lines += [f"  {line}" for line in given[:_MOST]]
    held = [
        f"{name} {describe(x)}"
        for name, x in bookkeeping.attribute_items(frame.module)
        if isinstance(x, Variable)
    ]
    if held:
        more = [f"{len(held) - _MOST} more"] * (len(held) > _MOST)
        lines.append("  Variables: " + ", ".join(held[:_MOST] + more))
    return "\n".join(lines)


def _article(name: str) -> str:
    # An acronym is spelled: an LSTMCell, but a LoRA.
    vowels = "AEFHILMNORSX" if name[:2].isupper() else "AEIOU"
    return f"{'an' if name[:1] in vowels else 'a'} {name}"


def _arguments(frame: Frame, method: Callable[..., Any]) -> Mapping[str, Any]:
    try:
        signature = inspect.signature(method)
        bound = signature.bind(frame.module, *frame.args, **frame.kwargs).arguments
    except TypeError:
        return {f"args[{i}]": x for i, x in enumerate(frame.args)} | {**frame.kwargs}
    return dict([*bound.items()][1:])


def describe(x: Any) -> str:
    """Dtype and shape of what is like an array; the contents of small containers."""
    if isinstance(x, Variable):
        return f"{type(x).__name__} {describe(x.get_raw_value())}"
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return f"{x.dtype}{[*x.shape]}"
    if isinstance(x, (bool, int, float, complex, str, type(None))):
        text = repr(x)
        return text if len(text) < 40 else f"{text[:36]}..."
    if type(x) in (list, tuple, dict) and 0 < len(x) <= _MOST:
        return _describe_items(x)
    return type(x).__name__


def _describe_items(x: Any) -> str:
    if isinstance(x, dict):
        items = [f"{key!r}: {describe(value)}" for key, value in x.items()]
        return "{" + ", ".join(items) + "}"
    texts = ", ".join(map(describe, x))
    return f"[{texts}]" if isinstance(x, list) else f"({texts}{',' * (len(x) == 1)})"
