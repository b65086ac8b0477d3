"""A transform as a row of a table: what goes in, what comes out, what else it does."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Mapping
from typing import Any

from graftree.config import Propagation
from graftree.transforms.crossing.arguments import Chosen
from graftree.transforms.crossing.prefixes import Occurrence, Prefix
from graftree.transforms.crossing.signatures import ARGS, Labels, Signature, Signatures


class Keywords(enum.Enum):
    """What becomes of keyword arguments."""

    STAY = "stay"
    BECOME_POSITIONAL = "become positional"  # those have a prefix
    REFUSED = "refused"


@dataclasses.dataclass(frozen=True)
class Row:
    """What is lifted, and how.

    Attributes:
        name: The public name of the transform.
        mode: What propagates.
        inputs: The prefix of ``(args, kwargs)``, without the static arguments.
        outputs: The prefix of the output.
        statics: Which arguments are static.
        keywords: What becomes of keyword arguments, without graph updates and with.
        axis_metadata: What is told to Variables whose axis the transform takes away
            inside: the ``transform_metadata`` of the public functions.
        returns_placed: Whether, with graph updates, Variables whose prefix is not
            ``None`` come back also if the function didn't change them.
        returns_captured: Whether, with graph updates, objects of an outer trace may be
            returned, as copies.
        is_detached: Whether nothing reaches the caller's objects, and the output is
            made of new ones.
        labels: What the positional arguments are called in messages.
        signatures: Those of earlier calls, if JAX keeps what it compiled for them.
    """

    name: str
    mode: Propagation
    inputs: Prefix
    outputs: Prefix
    statics: Chosen = Chosen()
    keywords: tuple[Keywords, Keywords] = (Keywords.STAY, Keywords.BECOME_POSITIONAL)
    axis_metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    returns_placed: bool = False
    returns_captured: bool = False
    is_detached: bool = False
    labels: Labels = ARGS
    signatures: Signatures | None = None

    @staticmethod
    def uniform(name: str, mode: Propagation, **options: Any) -> Row:
        """The row of a transform that treats all leaves alike."""
        both = Prefix(None, "args", name, mode)
        return Row(name, mode, both, both, **options)

    def occurrences(self, tree: Any) -> Iterator[Occurrence]:
        """The Variables in ``(args, kwargs)``, each wherever it occurs."""
        for path, leaf, prefix in self.inputs.occurrences(tree, self.mode.sharing):
            yield path[1:], leaf, prefix  # without the index of args or kwargs

    def may_differ(self, *signatures: Signature | None) -> bool:
        """Whether a Variable could occur twice in these, with different prefixes."""
        distinct = {*self.inputs.distinct, *self.outputs.distinct}
        return (
            self.mode.sharing
            and len(distinct) > 1
            and any(x is not None and x.has_references() for x in signatures)
        )

    @property
    def keyword_rule(self) -> Keywords:
        """What becomes of keyword arguments in its mode."""
        return self.keywords[self.mode.structure]
