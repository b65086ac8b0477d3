"""The names of dtypes in safetensors files."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

# In the order of the format, which sorts tensors by it, the last first.
_SCALARS = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "F8_E5M2": jnp.float8_e5m2,
    "F8_E4M3": jnp.float8_e4m3fn,
    "F8_E8M0": jnp.float8_e8m0fnu,
    "F8_E4M3FNUZ": jnp.float8_e4m3fnuz,
    "F8_E5M2FNUZ": jnp.float8_e5m2fnuz,
    "I16": np.int16,
    "U16": np.uint16,
    "F16": np.float16,
    "BF16": jnp.bfloat16,
    "I32": np.int32,
    "U32": np.uint32,
    "F32": np.float32,
    "C64": np.complex64,
    "F64": np.float64,
    "I64": np.int64,
    "U64": np.uint64,
}

BY_NAME = {name: np.dtype(scalar) for name, scalar in _SCALARS.items()}
NAMES = {dtype: name for name, dtype in BY_NAME.items()}
RANKS = {dtype: rank for rank, dtype in enumerate(BY_NAME.values())}

# Several elements share a byte there, so no slice of them is a range of bytes.
PACKED = ("F4", "F6_E2M3", "F6_E3M2")
