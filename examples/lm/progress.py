"""The live display of the training: a bar that moves, and a line at each test."""

import math
import time
from typing import Self

from rich import console as rich_console

from examples import bars
from examples.lm.curves import Curve


class Clock:
    """Counts the tokens of training steps, and the time that these took.

    It stands still while something else is done. `tick` is called when the loss of a
    step has been read, so that the step is known to be over.

    Args:
        tokens: Tokens per step.
    """

    def __init__(self, tokens: int):
        self._tokens = tokens
        self._steps = 0
        self._seconds = 0.0
        self._since = time.perf_counter()

    def tick(self) -> None:
        """Counts a step, and the time since the last call."""
        now = time.perf_counter()
        self._steps += 1
        self._seconds += now - self._since
        self._since = now

    def restart(self) -> None:
        """Leaves out the time since the last call."""
        self._since = time.perf_counter()

    @property
    def tokens_per_second(self) -> float:
        """The rate so far; 0 before the first step."""
        return self._steps * self._tokens / self._seconds if self._seconds else 0.0


class Display(bars.Bar):
    """Shows how training goes while it is entered as a context.

    Args:
        console: Where to show it.
        curve: The losses, which the training adds to.
        steps: Number of steps of the whole run.
        clock: Counts the steps that are shown.
    """

    def __init__(
        self, console: rich_console.Console, curve: Curve, steps: int, clock: Clock
    ):
        self._curve, self._steps, self._clock = curve, steps, clock
        text = "step {task.completed}/{task.total}"
        super().__init__(console, text, steps, len(curve.training), scores="")

    def __enter__(self) -> Self:
        self._clock.restart()
        return super().__enter__()

    def show_step(self) -> None:
        """Counts a step, and moves the bar."""
        self._clock.tick()
        loss = self._curve.training[-1]
        self.step(f"loss {loss:.4f}, {self._clock.tokens_per_second:,.0f} tokens/s")

    def show_test(self) -> None:
        """Prints the line of a test, whose time doesn't count."""
        step, held_out = self._curve.held_out[-1]
        width = len(str(self._steps))
        self.line(
            f"step {step:{width}}/{self._steps}"
            f"   training: loss {self._curve.training[-1]:.4f}"
            f"   held-out: loss {held_out:.4f}, {held_out / math.log(2):.3f} bits/byte"
            f"   {self._clock.tokens_per_second:,.0f} tokens/s"
        )
        self._clock.restart()
