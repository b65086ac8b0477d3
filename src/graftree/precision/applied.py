"""What a policy has set in a model, and what it could not, to print."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from graftree import errors
from graftree.annotations import Path
from graftree.core import paths
from graftree.core.text import short_forms
from graftree.core.variables.variables import Variable
from graftree.precision.policies import Policy


@dataclasses.dataclass(frozen=True)
class Layer:
    """What a layer has now.

    Attributes:
        path: Its keys, from the model.
        kind: The name of its class.
        policy: Its dtypes, ``None`` where it has none of the kind.
    """

    path: Path
    kind: str
    policy: Policy


@dataclasses.dataclass(frozen=True)
class UnknownLayer:
    """A module with Params of its own that does not say in which dtype it computes.

    Attributes:
        path: Its keys, from the model.
        kind: The name of its class.
        params: Its Params, as in ``scale float32[8]``.
    """

    path: Path
    kind: str
    params: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Applied:
    """What was set; it prints as a table.

    Attributes:
        policy: The policy of the model.
        layers: The layers that were set, in the order of the model.
        unknown: The layers with Params but without ``dtype``, which are as they were.
    """

    policy: Policy
    layers: tuple[Layer, ...]
    unknown: tuple[UnknownLayer, ...]

    def __str__(self) -> str:
        parts = ("params", "compute", "output")
        rows = []
        for layer in self.layers:
            cells = [str(getattr(layer.policy, part) or "-") for part in parts]
            rows.append((paths.dotted(layer.path), layer.kind, *cells))
        text = "\n".join(
            short_forms.aligned(
                [("layer", "class", *parts), *short_forms.folded_rows(rows)]
            )
        )
        if self.unknown:
            text += "\n\n" + unknown_message(self.unknown)
        return text


def unknown_layer(
    path: Path, layer: Any, params: Sequence[tuple[Path, Variable[Any]]]
) -> UnknownLayer:
    """Describes a layer in which nothing can be set; ``params`` with their paths."""
    told = [_told(inner[len(path) :], variable) for inner, variable in params]
    return UnknownLayer(path, type(layer).__name__, tuple(told))


def _told(path: Path, variable: Variable[Any]) -> str:
    raw = variable.get_raw_value()
    kind = f" {raw.dtype}{[*raw.shape]}" if hasattr(raw, "dtype") else ""
    return paths.dotted(path) + kind


def unknown_message(unknown: Sequence[UnknownLayer]) -> str:
    """What is said of the layers in which nothing can be set."""
    rows = [(paths.dotted(x.path), x.kind, ", ".join(x.params)) for x in unknown]
    return errors.message(
        "A policy can set nothing in these layers: they have Params, but no attribute "
        "`dtype`. They are as they were.",
        where="\n".join(short_forms.aligned(short_forms.folded_rows(rows))),
        way_out="Give their class `dtype` and `param_dtype`, which its methods use; or "
        'say that they are to stay: exceptions={Class: "keep"}.',
    )
