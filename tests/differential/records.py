"""What is noted of a statement that ran, and where two notes differ."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np


@dataclasses.dataclass
class Step:
    """One statement.

    Attributes:
        error: The built-in type that the exception derives from, if one was raised.
        told: The texts of the exception, its notes and the warnings.
        shown: What the program showed.
        state: All objects that the program has names for.
    """

    error: str
    told: list
    shown: list
    state: dict


def builtin_name(error):
    """The built-in class of an exception: libraries derive their own from it."""
    return next(c.__name__ for c in type(error).__mro__ if c.__module__ == "builtins")


class Description:
    """Objects as plain data, in which equal parts of two libraries are equal.

    Args:
        words: The vocabulary, as executed with the library.
    """

    def __init__(self, words):
        self.words = words
        self.nnx = words["nnx"]
        self.seen = {}

    def of(self, x):
        if isinstance(x, jax.core.Tracer):
            return "a tracer"
        if self.words["is_array"](x):
            return np.asarray(x)
        if id(x) in self.seen:
            return f"object {self.seen[id(x)][0]} again"
        if isinstance(x, (self.nnx.Variable, self.nnx.Pytree, list, dict)):
            return self._of_object(x)
        if isinstance(x, tuple) and not hasattr(x, "_fields"):
            if any(map(self._is_data, x)):
                return tuple(map(self.of, x))
        return self.words["exact"](x)

    def _is_data(self, x):
        kinds = (self.nnx.Variable, self.nnx.Pytree, jax.Array, np.ndarray)
        return isinstance(x, kinds)

    def _of_object(self, x):
        # The object is kept, so that nothing else gets its id.
        self.seen[id(x)] = len(self.seen), x
        note = {"type": type(x).__name__}
        if isinstance(x, self.nnx.Variable):
            note["value"] = self.of(x.get_value())
            note["metadata"] = {
                key: self.words["exact"](value)
                for key, value in self.words["metadata"](x)
            }
            return note
        return note | {str(key): self.of(v) for key, v in self.words["children"](x)}


def of_result(words, x):
    """What a call returned; there numbers are arrays."""
    if isinstance(x, (bool, int, float, np.generic)):
        return np.asarray(x, np.float32)
    if isinstance(x, (list, tuple)):
        return [of_result(words, child) for child in x]
    return Description(words).of(x)


def difference(expected, actual, path="", are_same=None):
    """Where two descriptions differ, and how; ``None`` if they don't.

    Arrays may differ by rounding, unless ``are_same`` compares them.
    """
    are_same = are_same or _are_close
    if isinstance(expected, (list, tuple)) and isinstance(actual, type(expected)):
        expected, actual = dict(enumerate(expected)), dict(enumerate(actual))
    if isinstance(expected, dict) and isinstance(actual, dict):
        if expected.keys() == actual.keys():
            keys = [(key, f"{path}.{key}") for key in expected]
            found = (
                difference(expected[k], actual[k], where, are_same) for k, where in keys
            )
            return next(filter(None, found), None)
    elif isinstance(expected, np.ndarray):
        if are_same(expected, actual):
            return None
    elif type(expected) is type(actual) and expected == actual:
        return None
    return f"{path or 'the whole'}: expected {short(expected)}, got {short(actual)}"


def _are_close(expected, actual):
    same_kind = isinstance(actual, np.ndarray) and expected.dtype == actual.dtype
    if not same_kind or expected.shape != actual.shape:
        return False
    return np.allclose(expected, actual, rtol=1e-5, atol=1e-2, equal_nan=True)


def are_same_bits(expected, actual):
    """Whether two arrays have the same type, shape and bits."""
    if type(expected) is not type(actual):
        return False
    facts = [(x.dtype, x.shape, x.tobytes()) for x in (expected, actual)]
    return facts[0] == facts[1]


def short(x):
    try:
        text = " ".join(repr(x).split())
    except RuntimeError:  # of a value whose methods fail
        text = type(x).__name__
    return text if len(text) < 200 else text[:200] + "..."


def first_difference(expected, actual, exactly=False):
    """Where two runs differ: the number of a statement, of what kind, and how.

    The kind is what differs, and the error expected there. Two runs of one library
    should be ``exactly`` the same: bits and texts, too.
    """
    parts = ["error", "shown", "state"] + ["told"] * exactly
    are_same = are_same_bits if exactly else None
    for number, (left, right) in enumerate(zip(expected, actual, strict=True)):
        for what in parts:
            pair = getattr(left, what), getattr(right, what)
            found = difference(*pair, are_same=are_same)
            if found:
                return number, (what, left.error), found
    return None
