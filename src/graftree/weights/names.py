"""Names of tensors and paths in a model, both with places for indices: ``{i}``.

model.layers.{i}.mlp.up_proj      a name in a file
blocks[{i}].mlp.up                a path in a model; `blocks.{i}.mlp.up` is the same
norm.scales['kernel',]            a path with a key that is a tuple
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
from collections.abc import Mapping

from graftree import errors
from graftree.annotations import Key


@dataclasses.dataclass(frozen=True)
class Place:
    """Where an index stands in a path."""

    name: str


_PLACE = re.compile(r"\{([^{}]*)\}")


@functools.lru_cache(maxsize=4096)
def places(text: str) -> tuple[str, ...]:
    """The names of the places in a name or a path.

    Raises:
        ValueError: If braces have no counterpart, or what is in them is no name.
    """
    found = _PLACE.findall(text)
    rest = _PLACE.sub("", text)
    if "{" in rest or "}" in rest or not all(map(str.isidentifier, found)):
        raise ValueError(
            errors.message(
                f"{text!r} is no name of tensors.",
                way_out="An index stands in braces, with a name of its own: '{i}'.",
            )
        )
    return tuple(dict.fromkeys(found))


def filled(name: str, indices: Mapping[str, int]) -> str:
    """A name in a file with indices in its places."""
    return _PLACE.sub(lambda place: str(indices[place[1]]), name)


_TEXT = r"""(?:'[^'\\]*'|"[^"\\]*")"""
_TEXTS = rf"{_TEXT}(?:, ?{_TEXT})*,?"
_STEP = re.compile(
    rf"\[(?:\{{(?P<item>\w+)\}}|(?P<key>{_TEXTS}|\({_TEXTS}\)|-?\d+))\]"
    r"|(?:^|\.)(?:\{(?P<place>\w+)\}|(?P<name>[^.\[\]{}'\"\s]+))"
)


@functools.lru_cache(maxsize=4096)
def steps(path: str) -> tuple[Key | Place, ...]:
    """The steps of a path in a model.

    Raises:
        ValueError: If it is malformed.
    """
    found: list[Key | Place] = []
    position = 0
    while position < len(path):
        step = _STEP.match(path, position)
        if step is None:
            raise ValueError(
                errors.message(
                    f"The path {path!r} is malformed at {path[position:]!r}.",
                    way_out="Write a path as Python does, with '{i}' for an index, "
                    "such as 'blocks[{i}].mlp.up'.",
                )
            )
        place, name = step["item"] or step["place"], step["name"]
        if place:
            found.append(Place(place))
        elif name is not None:
            found.append(int(name) if name.isascii() and name.isdigit() else name)
        else:
            found.append(ast.literal_eval(step["key"]))
        position = step.end()
    return tuple(found)
