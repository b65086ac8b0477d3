"""The text: bytes as tokens, batches of it, and a part of it held out.

A batch is a function of the seed and the number of the step. So it is the same however
many devices and processes share it, and a run that goes on after a stop needs to know
no more than the number of its step.
"""

import pathlib
from typing import NamedTuple

import jax
import numpy as np

import graftree as nnx

HELD_OUT_SHARE = 0.1
FOLDER = pathlib.Path(__file__).parent / "text"


class Text(NamedTuple):
    """What to learn from, and what to be tested on: bytes."""

    train: np.ndarray
    held_out: np.ndarray


def load() -> Text:
    """Returns the books; the last tenth of each is held out."""
    train, held_out = [], []
    for path in sorted(FOLDER.glob("*.txt")):
        book = np.frombuffer(path.read_bytes(), np.uint8)
        end = round(len(book) * (1 - HELD_OUT_SHARE))
        train.append(book[:end])
        held_out.append(book[end:])
    return Text(np.concatenate(train), np.concatenate(held_out))


class Batches:
    """Batches of random pieces of a text, by step.

    Args:
        text: The bytes.
        size: Pieces per batch, over all processes.
        length: Tokens that a piece is read for; it has one more, to be said last.
        seed: Decides which pieces; another step has others.
        sharding: Where the rows go.
    """

    def __init__(
        self,
        text: np.ndarray,
        size: int,
        length: int,
        seed: int,
        sharding: jax.sharding.Sharding,
    ):
        self._text = text
        self._size = size
        self._length = length
        self._seed = seed
        self._sharding = sharding

    def __call__(self, step: int) -> jax.Array:
        """Returns the tokens ``[size, length + 1]`` of a step, an int32 each."""
        generator = np.random.default_rng((self._seed, step))
        last = len(self._text) - self._length - 1
        starts = generator.integers(0, last, self._size, endpoint=True)
        return _placed(self._text, starts, self._length, self._sharding)


def held_out_batches(
    text: np.ndarray, size: int, length: int, sharding: jax.sharding.Sharding
) -> list[jax.Array]:
    """Returns all of a text, in batches; the pieces overlap as much as full ones must.

    Args:
        text: The bytes.
        size: Pieces per batch.
        length: Tokens that a piece is read for.
        sharding: Where the rows go.
    """
    count = size * -(-len(text) // (length * size))
    starts = np.linspace(0, len(text) - length - 1, count).astype(np.int64)
    return [
        _placed(text, starts[first : first + size], length, sharding)
        for first in range(0, count, size)
    ]


def _placed(
    text: np.ndarray, starts: np.ndarray, length: int, sharding: jax.sharding.Sharding
) -> jax.Array:
    """The pieces that begin at ``starts``; a process cuts out its own only."""
    own = starts[_own_rows(len(starts), sharding)]
    pieces = text[own[:, np.newaxis] + np.arange(length + 1)].astype(np.int32)
    return nnx.sharding.global_batch(pieces, sharding)


def _own_rows(size: int, sharding: jax.sharding.Sharding) -> np.ndarray:
    """The numbers of the rows that devices of this process need."""
    parts = sharding.addressable_devices_indices_map((size,)).values()
    return np.unique(np.concatenate([np.arange(size)[rows] for (rows,) in parts]))
