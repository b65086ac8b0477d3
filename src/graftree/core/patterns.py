"""Patterns select parts of a model by their paths.

A pattern is a path as Python writes it, with stars for the parts that may differ:

    encoder.blocks[3].mlp     this path, as `paths.dotted` prints it
    encoder.blocks[*].mlp     ``*`` is any one step, in brackets or not
    encoder.*.scale_*         and any part of a name
    encoder.blocks[:6].mlp    a range of indices, as in Python
    encoder.**                ``**`` is any number of steps, also none
    **.{query,value}          ``{a,b}`` is either; also of longer parts: ``{a.b,c}``
    cells['my key']           a key that is not a name is quoted, in brackets

A pattern matches whole paths: ``encoder`` is that module, and not its parts. As some
messages print paths, an index may be a step too, ``blocks.3``, and ``/`` may be the
separator. A star never stands for nothing: ``blocks[*]`` is not ``blocks``.

`to_predicate` takes patterns as well as classes and predicates; all functions that
select parts of a model take the same.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import itertools
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from graftree import errors
from graftree.annotations import Key, Path, Predicate
from graftree.core import filters, paths

# Matches one key; `None` stands for any number of keys.
_Matcher = Callable[[Key], bool] | None
# The progress of a path: (alternative, number of its steps that are matched).
Progress = frozenset[tuple[int, int]]


@dataclasses.dataclass(frozen=True, repr=False)
class Pattern:
    """Matches paths; a filter like any other, so `nnx.All` and others combine it.

    Args:
        text: The pattern, as described above.

    Raises:
        TypeError: If it is not a string.
        ValueError: If it is malformed.

    Example:
        >>> from graftree.core import patterns
        >>> pattern = patterns.Pattern("blocks[:2].**.kernel")
        >>> pattern(("blocks", 1, "mlp", "kernel"), None)
        True
        >>> pattern(("blocks", 2, "mlp", "kernel"), None)
        False
    """

    text: str

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            kind = type(self.text).__name__
            raise TypeError(f"A pattern of paths is a string, got {kind}.")
        _alternatives(self.text)

    def __call__(self, path: Path, x: Any = None) -> bool:
        """Whether the whole path matches."""
        progress = self.begin()
        for key in path:
            progress = self.advance(progress, key)
        return self.is_complete(progress)

    def __repr__(self) -> str:
        return f"Pattern({self.text!r})"

    # Step by step, for walks that follow several paths to one object.

    def begin(self) -> Progress:
        """Starts the match, with the empty path."""
        return self._skip_stars((index, 0) for index in range(len(self._steps)))

    def advance(self, progress: Progress, key: Key) -> Progress:
        """Extends the path by a key; the progress is empty if it can't match."""
        return self._skip_stars(
            (index, position + (matcher is not None))
            for index, position in progress
            for matcher in self._steps[index][position : position + 1]
            if matcher is None or matcher(key)
        )

    def is_complete(self, progress: Progress) -> bool:
        """Whether a path with this progress matches."""
        return any(position == len(self._steps[n]) for n, position in progress)

    @property
    def _steps(self) -> tuple[tuple[_Matcher, ...], ...]:
        return _alternatives(self.text)

    def _skip_stars(self, progress: Iterable[tuple[int, int]]) -> Progress:
        """Adds the positions behind each ``**``, which may stand for nothing."""
        positions = set()
        for index, position in progress:
            steps = self._steps[index]
            positions.add((index, position))
            while position < len(steps) and steps[position] is None:
                position += 1
                positions.add((index, position))
        return frozenset(positions)


def to_predicate(selection: Any) -> Predicate:
    """Turns a selection of parts of a model into a predicate.

    Args:
        selection: A pattern of paths, a class (or union of classes), a function of
            path and object, ``...`` for everything, or a list or tuple of these, of
            which one must match. Unlike in a filter, a string is a pattern and not a
            tag.

    Returns:
        A function ``(path, object) -> bool``.

    Raises:
        TypeError: If ``selection`` is none of these.
        ValueError: If a pattern is malformed.

    Example:
        >>> from graftree.core import patterns
        >>> select = patterns.to_predicate(["**.norm", nnx.LayerNorm])
        >>> select(("blocks", 0, "norm"), None)
        True
    """
    if isinstance(selection, str):
        return Pattern(selection)
    if isinstance(selection, (list, tuple)):
        return filters.Any(*map(to_predicate, selection))
    if selection is None or isinstance(selection, bool):
        raise TypeError(_unknown_selection(selection))
    try:
        return filters.to_predicate(selection)
    except TypeError:
        raise TypeError(_unknown_selection(selection)) from None


def _unknown_selection(x: Any) -> str:
    return errors.message(
        f"{x!r} of type {type(x).__name__} selects no parts of a model.",
        way_out="Pass a pattern of paths such as 'encoder.blocks[*].mlp', a class, a "
        "function of path and object, `...` for everything, or a list of these.",
    )


def no_match_error(
    call: str,
    selection: Any,
    path_list: Iterable[Path],
    *,
    noun: str = "module",
    owner: str = "the model",
) -> ValueError:
    """Builds the error for a selection that matches nothing; it names similar paths.

    Args:
        call: The function that was called, with its argument, for the message.
        selection: The selection, as `to_predicate` took it.
        path_list: The paths among which it selects.
        noun: The kind of object they lead to, in the singular.
        owner: The object that has them.
    """
    names = list(dict.fromkeys(map(paths.dotted, path_list)))
    wanted = _texts(selection)
    near = dict.fromkeys(
        name
        for text in wanted
        for name in difflib.get_close_matches(text, names, n=3, cutoff=0.6)
    )
    if near:
        location = f"similar paths: {', '.join(near)}"
    else:
        location = _list_names(names) if names else f"{owner} has no {noun}"
    way_out = "A pattern matches whole paths: '**' stands for any number of steps."
    return ValueError(
        errors.message(
            f"{call}={describe(selection)} matches no {noun} of {owner}.",
            where=location,
            way_out=way_out if wanted else "",
        )
    )


_MOST = 12


def _list_names(names: Sequence[str]) -> str:
    more = f", and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return f"available: {', '.join(names[:_MOST])}{more}"


def describe(selection: Any) -> str:
    """Puts a selection of parts of a model in words, for messages."""
    if isinstance(selection, type):
        return selection.__name__
    if isinstance(selection, Pattern):
        return repr(selection.text)
    if isinstance(selection, (list, tuple)):
        return f"[{', '.join(map(describe, selection))}]"
    return "..." if selection is ... else repr(selection)


def _texts(selection: Any) -> list[str]:
    """Lists the patterns in a selection."""
    if isinstance(selection, (list, tuple)):
        return [text for item in selection for text in _texts(item)]
    if isinstance(selection, Pattern):
        return [selection.text]
    return [selection] if isinstance(selection, str) else []


# Reading patterns: alternatives are spelled out first, then each is cut into steps.
# Malformed text raises a ValueError with only the reason, up to `_alternatives`.


@functools.lru_cache(maxsize=1024)
def _alternatives(text: str) -> tuple[tuple[_Matcher, ...], ...]:
    try:
        spelled_out = [paths.steps_of(plain) for plain in _expand_braces(text)]
        return tuple(
            tuple([_item(text) if is_item else _name(text) for text, is_item in steps])
            for steps in spelled_out
        )
    except ValueError as error:
        raise ValueError(
            errors.message(
                f"The pattern of paths {text!r} is malformed: {error}.",
                way_out="Write a path such as 'encoder.blocks[3].mlp'. '*' is one step "
                "or part of a name, '**' any number of steps, '{a,b}' either of two.",
            )
        ) from None


_BRACES = re.compile(rf"{paths.QUOTED}|[{{}},]")


def _expand_braces(text: str) -> list[str]:
    """Lists the patterns without braces that a pattern stands for."""
    ends = _first_braces(text)
    if not ends:
        return [text]
    prefix, suffix = text[: ends[0]], text[ends[-1] + 1 :]
    choices = [text[a + 1 : b].strip() for a, b in itertools.pairwise(ends)]
    return [
        plain
        for choice in choices
        for plain in _expand_braces(prefix + choice + suffix)
    ]


def _first_braces(text: str) -> list[int]:
    """Finds the first pair of braces and its commas; empty if there is none."""
    depth, ends = 0, list[int]()
    for brace in _BRACES.finditer(text):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if (brace[0], depth) in (("{", 1), (",", 1), ("}", 0)):
            ends.append(brace.start())
        if brace[0] == "}" and depth <= 0:
            break
    if depth:
        raise ValueError("a brace is not closed or not opened")
    return ends


_UNUSUAL = re.compile(r"[()|^$+\\?]")


def _name(text: str) -> _Matcher:
    """Returns the matcher of a step without brackets; for digits, of an index too."""
    if text == "**":
        return None
    if "**" in text:
        raise ValueError(f"'**' must be a step by itself, got {text!r}")
    if _UNUSUAL.search(text):
        raise ValueError(f"{text!r} is not a name: the only wildcard is '*'")
    if "*" in text:
        parts = re.compile(".*".join(map(re.escape, text.split("*"))), re.DOTALL)
        return lambda key: parts.fullmatch(str(key)) is not None
    index = paths.key_of(paths.PathStep(text, False))
    return lambda key: key == text or (type(key) is int and key == index)


def _item(text: str) -> _Matcher:
    """Returns the matcher of a step in brackets."""
    if text == "*":
        return lambda key: True
    if re.fullmatch(r"[0-9]+", text):
        return _name(text)
    if match := re.fullmatch(r"([0-9]*)\s*:\s*([0-9]*)", text):
        indices = range(int(match[1] or 0), int(match[2] or sys.maxsize))
        return lambda key: type(key) is int and key in indices
    if re.fullmatch(r"-[0-9 :-]*[0-9 :]|[0-9]*\s*:\s*-.*", text):
        raise ValueError(f"[{text}] counts from the end, which patterns can't do")
    try:
        literal = paths.key_of(paths.PathStep(text, True))
    except ValueError:
        raise ValueError(
            f"[{text}] is not an index, range, star or quoted key"
        ) from None
    return lambda key: type(key) is type(literal) and key == literal
