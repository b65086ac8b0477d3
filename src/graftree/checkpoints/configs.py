"""A description kept with a checkpoint: what a program needs to make the model again.

It is part of the note of a checkpoint, as JSON; tuples, keys that are not strings, and
NaN in the forms of `data_states.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from graftree import errors
from graftree.checkpoints import data_states

CONFIG = "config"


def to_json(config: Any, call: str) -> Any:
    """Returns a description as JSON; ``None`` if there is none.

    Raises:
        TypeError: If part of it can't be stored; lists all such paths.
    """
    problems = [f"{path} is a {name}" for path, name in _misfits(config, CONFIG)]
    if problems:
        raise TypeError(
            errors.message(
                f"{call}: part of the config can't be stored. Nothing was written.",
                where="\n".join(problems[:20]),
                way_out="A config can contain None, booleans, numbers, strings, and "
                "lists, tuples and dicts of these. Convert NumPy numbers with int(x) "
                "or float(x), and pass dtypes and functions by name: 'bfloat16'.",
            )
        )
    return data_states.encoded(config, CONFIG)


def _misfits(x: Any, path: str) -> Iterator[tuple[str, str]]:
    """Lists paths that can't be stored, each with the name of its type."""
    if type(x) is dict:
        for key, value in x.items():
            yield from _misfits(key, f"{path}, key {key!r}")
            yield from _misfits(value, f"{path}[{key!r}]")
    elif type(x) in (list, tuple):
        for i, value in enumerate(x):
            yield from _misfits(value, f"{path}[{i}]")
    # The exact types: one derived from them would come back as another.
    elif x is not None and type(x) not in (bool, int, float, str):
        yield path, f"{type(x).__module__}.{type(x).__qualname__}"


def check_same(configs: Sequence[Any]) -> None:
    """Raises if processes have different descriptions: only one is stored."""
    if len({json.dumps(config) for config in configs}) > 1:
        raise ValueError(
            "nnx.checkpoints: config differs between the processes, but only the first "
            "process saves it.\nPass the same config in all of them."
        )


def as_note(config: Any) -> dict[str, Any]:
    """Makes the part of a note that has the description, from its JSON."""
    return {} if config is None else {CONFIG: config}


def from_note(note: Any) -> Any:
    """Returns the description in the note of a checkpoint."""
    return data_states.decoded(note.get(CONFIG))
