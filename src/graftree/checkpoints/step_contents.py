"""What a step of `Checkpoints` consists of: objects, states of iterators, a note.

`StepContents` takes it from each process, and settles what is written for all of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from graftree import errors
from graftree.checkpoints import configs, data_states, orbax_side, stored_trees
from graftree.training import early_stopping

# The key of the scores in the note of a step.
SCORES = "scores"


class StepContents:
    """What one save of `Checkpoints` writes.

    Attributes:
        scores: Of the step.
        config: The description of the run, as JSON.
    """

    def __init__(self) -> None:
        self.scores: dict[str, float] = {}
        self.config: Any = None
        self._trees: dict[str, stored_trees.ToStore] = {}
        self._states: dict[str, Any] = {}  # of iterators

    def prepare(self, objects: Mapping[str, Any]) -> None:
        """Takes apart what this process saves; later changes don't reach it."""
        for name, obj in objects.items():
            if data_states.is_iterator(obj):
                self._states[name] = data_states.to_json(name, obj)
            else:
                tree = stored_trees.to_store(obj, "Checkpoints.save", name)
                self._trees[name] = tree

    def shared(self) -> tuple[Any, ...]:
        """Returns what the other processes need to know, as JSON."""
        digests = {name: tree.digest for name, tree in self._trees.items()}
        return self.scores, digests, self._states, self.config

    def settle(self, everyone: list[Any]) -> None:
        """Takes what is `shared` by each process.

        Raises:
            ValueError: If they differ where only those of the first are saved.
        """
        # As text: of several processes, the scores may have come as JSON. NaN is NaN.
        if len({json.dumps(scores) for scores, *_ in everyone}) > 1:
            raise ValueError(
                "Checkpoints.save: the scores differ between the processes, but only "
                "the first process saves them.\nReduce them over all processes first."
            )
        stored_trees.check_digests([digests for _, digests, *_ in everyone])
        configs.check_same([config for *_, config in everyone])
        self._states = {
            name: data_states.joined([states[name] for _, _, states, _ in everyone])
            for name in self._states
        }

    def note(self) -> dict[str, Any]:
        """Makes what is stored beside the objects."""
        scores = {SCORES: self.scores} if self.scores else {}
        return scores | configs.as_note(self.config)

    def arguments(self) -> Any:
        """Makes the arguments with which Orbax saves the objects."""
        args = orbax_side.load().args
        items = {name: args.JsonSave(x) for name, x in self._states.items()}
        items |= {name: args.StandardSave(x.tree) for name, x in self._trees.items()}
        return args.Composite(**items)


# Entries that Orbax has beside or in the place of an object.
_TAKEN = (orbax_side.TREE_FILE, orbax_side.STEP_FILE)


def check_names(objects: Mapping[str, Any]) -> None:
    """Raises unless objects can be saved under their names."""
    if not objects:
        raise ValueError(
            "Checkpoints.save expects the objects to save by name, e.g. "
            "save(step, model=model, optimizer=optimizer)."
        )
    for name, obj in objects.items():
        if not name.isidentifier() or name.startswith("__") or name in _TAKEN:
            raise ValueError(
                f"Checkpoints.save: {name!r} is not a name for a saved object: choose "
                "another identifier."
            )
        if obj is None:
            raise TypeError(f"Checkpoints.save: {name} is None. Leave it out.")


def checked_scores(scores: Any, best: str | None) -> dict[str, float]:
    """Checks the scores of a step, and converts them to numbers."""
    if not isinstance(scores, Mapping | None):
        raise TypeError(
            "Checkpoints.save expects scores to be a dict of numbers by name, got a "
            f"{type(scores).__name__}.\nTo save an object, use another name."
        )
    scores = {} if scores is None else scores
    if best is not None and best not in scores:
        raise ValueError(
            errors.message(
                f"Checkpoints.save: the score {best!r} is missing, but it decides "
                "which step is the best.",
                where=f"scores given: {', '.join(map(repr, scores)) or 'none'}",
                way_out=f"Pass scores={{{best!r}: ...}}, with float('nan') for a step "
                "that should not count as the best.",
            )
        )
    return {
        name: early_stopping.as_number(score, f"Checkpoints.save: the score {name!r}")
        for name, score in scores.items()
    }
