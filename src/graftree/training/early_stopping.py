"""Evaluation scores: compares two, and decides when to stop: `EarlyStopping`."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from graftree import _jax
from graftree.core.objects import pytrees
from graftree.core.text import descriptions
from graftree.core.variables.variables import Variable

# By mode, a score that every number is better than.
WORST = {"min": np.inf, "max": -np.inf}


def check_mode(mode: Any, function: str) -> None:
    """Raises a `ValueError` unless ``mode`` is ``"min"`` or ``"max"``."""
    if mode not in ("min", "max"):
        raise ValueError(f'{function} expects mode "min" or "max", got {mode!r}.')


def is_better(score: float, best: float, mode: str, min_delta: float = 0.0) -> bool:
    """Whether a score is better by more than ``min_delta``; NaN never is."""
    return score < best - min_delta if mode == "min" else score > best + min_delta


def check_number(score: Any, name: str) -> None:
    """Checks what should be a number; does not read it from the device.

    Raises:
        TypeError: If it is neither a real number nor an array ``[]`` with one.
    """
    if isinstance(score, _jax.Tracer):
        raise TypeError(
            f"{name} is traced, so it has no value yet.\nReturn it from the compiled "
            "function, and pass it on outside."
        )
    array = score if isinstance(score, jax.Array) else np.asarray(score)
    is_real = jnp.issubdtype(array.dtype, jnp.number) and array.dtype.kind != "c"
    if array.shape or not is_real:
        is_array = hasattr(score, "dtype")
        got = descriptions.describe(array) if is_array else f"a {type(score).__name__}"
        raise TypeError(f"{name} should be a number or an array [], got {got}.")


def as_number(score: Any, name: str) -> float:
    """Converts a score to a Python number.

    Raises:
        TypeError: As `check_number`.
    """
    check_number(score, name)
    return float(np.asarray(score))


class EarlyStopping(pytrees.Pytree):
    """Detects when training has stopped improving.

    Its counts are Variables, so a checkpoint can hold it: a resumed run stops where it
    would have stopped. Call it outside of compiled functions.

    Args:
        patience: How many evaluations in a row without an improvement to wait for.
        min_delta: A score must be better by more than this to count as an improvement;
            not negative.
        mode: Whether the best score is the smallest, ``"min"``, or the largest,
            ``"max"``.

    Attributes:
        best_metric: The best score so far, a Variable; infinite before the first.
        patience_count: How many evaluations ago that score was, a Variable.
        patience: As given; static.
        min_delta: As given; static.
        mode: As given; static.

    Raises:
        ValueError: If ``patience`` is less than one, ``min_delta`` is negative, or
            ``mode`` is another word.

    Example:
        >>> stopping = nnx.training.EarlyStopping(patience=2)
        >>> for epoch, loss in enumerate([0.5, 0.3, 0.4, float("nan"), 0.2]):
        ...     if stopping.update(loss):
        ...         best = epoch
        ...     if stopping.should_stop:
        ...         break
        >>> epoch, best
        (3, 1)
    """

    def __init__(
        self,
        patience: int,
        min_delta: float = 0.0,
        mode: Literal["min", "max"] = "min",
    ) -> None:
        if not isinstance(patience, int) or patience < 1:
            raise ValueError(f"EarlyStopping expects patience >= 1, got {patience!r}.")
        if not min_delta >= 0:
            raise ValueError(
                f"EarlyStopping expects min_delta >= 0, got {min_delta!r}."
            )
        check_mode(mode, "EarlyStopping")
        self.patience, self.min_delta, self.mode = patience, min_delta, mode
        # Python numbers: JAX would round them to float32.
        self.best_metric = Variable(WORST[mode])
        self.patience_count = Variable(0)

    def update(self, score: Any) -> bool:
        """Counts an evaluation.

        Args:
            score: A number, or an array ``[]``. NaN is not an improvement.

        Returns:
            Whether it improves on the best one so far.

        Raises:
            TypeError: If it is anything else, or traced.

        Example:
            >>> stopping = nnx.training.EarlyStopping(patience=3, min_delta=0.01)
            >>> [stopping.update(loss) for loss in (0.5, 0.495, jnp.array(0.4))]
            [True, False, True]
        """
        value = as_number(score, "EarlyStopping.update: the score")
        best, count = self.best_metric.get_value(), self.patience_count.get_value()
        is_improved = is_better(value, best, self.mode, self.min_delta)
        self.best_metric.set_value(value if is_improved else best)
        self.patience_count.set_value(0 if is_improved else count + 1)
        return is_improved

    @property
    def should_stop(self) -> bool:
        """Whether none of the last ``patience`` evaluations was an improvement."""
        return self.patience_count.get_value() >= self.patience
