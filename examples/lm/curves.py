"""What a run leaves behind in its folder: its curve, and what it cost.

The curve is also in each checkpoint, so that a run that goes on has the losses up to
there, whatever the one before it did afterwards.
"""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from examples import pictures

FILE = "run.json"


@dataclasses.dataclass
class Curve:
    """The losses of a run, in nats per byte.

    Attributes:
        training: Of each step, before its update.
        held_out: Pairs of a number of steps and the loss of the held-out text after it.
        stacked: Whether the blocks are a `Stack`: what else a checkpoint holds.
    """

    training: list[float] = dataclasses.field(default_factory=list)
    held_out: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    stacked: bool = False

    def get_state(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps."""
        return dataclasses.asdict(self)

    def set_state(self, state: dict[str, Any]) -> None:
        """Takes what `get_state` returned."""
        self.training = [*state["training"]]
        self.held_out = [(step, loss) for step, loss in state["held_out"]]
        self.stacked = state["stacked"]


@dataclasses.dataclass
class Record:
    """A run as its file has it.

    Attributes:
        label: Its layout, in words.
        experiment: What its losses depend on; see `Settings.experiment`.
        devices: The devices, in words.
        parameters: Numbers in the model.
        total_bytes: Bytes of model and optimizer.
        state_bytes: Bytes of them on the device that has most.
        step_bytes: Bytes that the compiled step needs there beside them.
        collectives: For each kind of exchange in a step how often it occurs, and the
            bytes of what is exchanged; see `nnx.forecast.collectives`.
        tokens_per_second: Over all devices, without what is not training.
        curve: The losses.
    """

    label: str
    experiment: dict[str, Any]
    devices: str
    parameters: int
    total_bytes: int
    state_bytes: int
    step_bytes: int
    collectives: Mapping[str, tuple[int, int]]
    tokens_per_second: float = 0.0
    curve: Curve = dataclasses.field(default_factory=Curve)

    def write(self, folder: pathlib.Path) -> None:
        """Writes the record to a folder, in place of an older one."""
        with pictures.replacing(folder / FILE) as temporary:
            temporary.write_text(json.dumps(dataclasses.asdict(self), indent=1))


def read(folder: pathlib.Path) -> Record | None:
    """Returns the record in a folder; ``None`` if there is none.

    Raises:
        ValueError: If the file is not a record.
    """
    path = folder / FILE
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text())
        curve = Curve()
        curve.set_state(content.pop("curve"))
        return Record(**content, curve=curve)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is not a record of a run: {error}") from error
