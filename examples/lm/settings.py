"""The settings of a run: the options, and what follows from them together.

Nothing here needs JAX: a wrong option is answered before JAX is loaded.
"""

import argparse
import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

AXES = ("data", "fsdp", "tensor")
VOCABULARY = 256  # the tokens are bytes

# Short names of policies; see `nnx.precision`.
POLICIES = {
    "f32": "params=f32, compute=f32, output=f32",
    "bf16": "params=f32, compute=bf16, output=f32",
}


class WrongOption(ValueError):
    """An option that can't be followed; the message is one line."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """The options of a run.

    Attributes:
        mesh: Sizes of the axes of the mesh; empty: all devices along ``data``.
        stack: Whether the blocks are a `Stack`.
        precision: A name in `POLICIES`, or a policy.
        accumulate: In how many parts the gradient of a batch is computed.
        remat: Whether the blocks are computed again in gradients.
        steps: Number of training steps.
        batch_size: Pieces of text per step, over all devices and processes.
        length: Bytes per piece.
        seed: Decides the first weights and the batches.
        every: Steps between checkpoints, and between losses of the held-out text.
        output: An existing folder for checkpoints, curve and pictures.
        layers, width, heads, kv_heads, hidden: The sizes of the network.
        prompt: What the sample of text begins with.
        sample: Length of the sample in bytes.
        temperature: How freely the sample is drawn; 0 takes the likeliest byte.
    """

    mesh: Mapping[str, int] = dataclasses.field(default_factory=dict)
    stack: bool = False
    precision: str = "f32"
    accumulate: int = 1
    remat: bool = False
    steps: int = 300
    batch_size: int = 16
    length: int = 128
    seed: int = 0
    every: int = 50
    output: pathlib.Path = pathlib.Path("out/lm")
    layers: int = 4
    width: int = 128
    heads: int = 8
    kv_heads: int = 4
    hidden: int = 384
    prompt: str = "Alice was "
    sample: int = 118
    temperature: float = 0.7

    @property
    def policy(self) -> str:
        """The policy of the model."""
        return POLICIES.get(self.precision, self.precision)

    @property
    def label(self) -> str:
        """What distinguishes the layout, as in ``fsdp=4,tensor=2 stack``."""
        parts = [in_words(self.mesh)]
        parts += [name for name in ("stack", "remat") if getattr(self, name)]
        if self.precision != "f32":
            parts.append(self.precision)
        if self.accumulate > 1:
            parts.append(f"accumulate={self.accumulate}")
        return " ".join(parts)

    def experiment(self) -> dict[str, Any]:
        """What the losses depend on, but for rounding: a run goes on with the same."""
        names = (
            *("steps", "batch_size", "length", "seed", "precision"),
            *("layers", "width", "heads", "kv_heads", "hidden"),
        )
        return {name: getattr(self, name) for name in names}

    def check(self) -> None:
        """Raises if the options don't fit together.

        Raises:
            WrongOption: If a size is not a multiple of what divides it.
        """
        if not self.prompt:
            raise WrongOption("--prompt: expected some text to begin with")
        sizes = dict.fromkeys(AXES, 1) | {**self.mesh}
        data, fsdp, tensor = [sizes[axis] for axis in AXES]
        for option, size, divisor, what in (
            ("--heads", self.heads, self.kv_heads, "--kv-heads"),
            ("--width", self.width, 2 * self.heads, "two for each of --heads"),
            (
                "--batch-size",
                self.batch_size,
                data * fsdp * self.accumulate,
                f"{data} for data, times {fsdp} for fsdp, times {self.accumulate} for "
                "--accumulate",
            ),
            ("--width", self.width, fsdp, "fsdp of --mesh"),
            ("--kv-heads", self.kv_heads, tensor, "tensor of --mesh"),
            ("--hidden", self.hidden, tensor, "tensor of --mesh"),
            ("--mesh: the number of tokens", VOCABULARY, tensor, "tensor"),
        ):
            if size % divisor:
                raise WrongOption(
                    f"{option}: expected a multiple of {divisor} ({what}), got {size}"
                )


def in_words(mesh: Mapping[str, int]) -> str:
    """Returns the sizes of a mesh as the option has them: ``fsdp=4,tensor=2``."""
    return ",".join(f"{axis}={size}" for axis, size in mesh.items())


def parse_mesh(text: str) -> dict[str, int]:
    """Reads the sizes of a mesh, the inverse of `in_words`.

    Raises:
        WrongOption: If an axis is unknown or given twice, or a size is not positive.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = part.partition("=")
        if axis not in AXES:
            raise WrongOption(
                f"there is no axis {axis!r}: expected some of {', '.join(AXES)}, each "
                f"with a size, as in fsdp=4,tensor=2; got {text!r}"
            )
        if axis in sizes:
            raise WrongOption(f"the axis {axis} is given twice: {text!r}")
        if not (size.isascii() and size.isdecimal() and 0 < int(size) <= 4096):
            raise WrongOption(
                f"expected a size from 1 to 4096 for {axis}, got {size!r}: {text!r}"
            )
        sizes[axis] = int(size)
    return sizes


def converted(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Returns a converter whose errors argparse shows."""

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except WrongOption as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert
