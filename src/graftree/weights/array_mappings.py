"""Arrays by name as a source: of NumPy, of JAX, or tensors of PyTorch.

PyTorch is not imported: its tensors are known by what they can do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from graftree.weights import slices, stored_dtypes, stored_tensors
from graftree.weights.stored_tensors import Stored


class ArrayMapping(stored_tensors.Source):
    """A dict of arrays, such as the state dict of a PyTorch model.

    Raises:
        TypeError: If a name is no string, or a value no array of numbers.
    """

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        self.name = f"the {type(arrays).__name__} of {len(arrays)} arrays"
        self._arrays = dict(arrays)
        self._bytes_read = 0
        tensors = {name: _stored(value) for name, value in self._arrays.items()}
        refused = [
            f"{name!r}: {_described(self._arrays[name])}"
            for name, stored in tensors.items()
            if stored is None or not isinstance(name, str)
        ]
        if refused:
            raise TypeError(
                stored_tensors.errors.message(
                    f"nnx.weights can't read {self.name}.",
                    where="\n".join(refused[:20]),
                    way_out="Names must be strings, and values arrays of numbers that "
                    "this process holds.",
                )
            )
        self.tensors = {name: stored for name, stored in tensors.items() if stored}

    @property
    def bytes_read(self) -> int:
        """How many bytes of slices have been taken."""
        return self._bytes_read

    def read(
        self,
        name: str,
        index: Sequence[slice],
        shape: Sequence[int] | None = None,
    ) -> np.ndarray:
        """A copy of a slice."""
        stored = self.tensors[name].viewed(shape)
        slices.bounds_of(stored.shape, index)
        array = self._arrays[name]
        if stored != self.tensors[name]:
            array = array.reshape(stored.shape)
        part = array[tuple(index)]
        if hasattr(part, "detach"):
            part = part.detach().cpu()
            if stored.dtype.name in _WIDENED:
                part = part.float()
            part = part.numpy()
        array = np.array(part, stored.dtype, order="C")
        self._bytes_read += array.nbytes
        return array

    def close(self) -> None:
        """Lets go of the arrays."""
        self._arrays = {}


# Dtypes that PyTorch has and NumPy lacks, by the name that both give them. Their values
# go through float32, which has all of them.
_WIDENED = {
    dtype.name: dtype
    for dtype in stored_dtypes.NAMES
    if jnp.issubdtype(dtype, jnp.floating) and dtype.type.__module__ != "numpy"
}


def _stored(value: Any) -> Stored | None:
    """What it is, or None if it is no array of numbers."""
    if isinstance(value, jax.Array):
        is_data = not jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
        if not is_data or not value.is_fully_addressable:
            return None
    elif hasattr(value, "detach"):
        name = str(value.dtype).rpartition(".")[2]
        try:
            dtype = _WIDENED[name] if name in _WIDENED else np.dtype(name)
        except TypeError:
            return None
        return Stored(dtype, tuple(value.shape))
    elif not isinstance(value, np.ndarray):
        return None
    return (
        Stored(np.dtype(value.dtype).newbyteorder("="), tuple(value.shape))
        if (is_numeric(value.dtype))
        else None
    )


def is_numeric(dtype: np.dtype) -> bool:
    """Whether its elements are booleans or numbers."""
    return dtype.kind in "biufc" or dtype in stored_dtypes.NAMES


def _described(value: Any) -> str:
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    if dtype is None or shape is None:
        return type(value).__name__
    return f"{type(value).__name__} {dtype}{[*shape]}"
