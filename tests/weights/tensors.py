"""Random tensors, and what stands for PyTorch."""

import jax.numpy as jnp
import numpy as np

rng = np.random.default_rng(0)


def numbers(*shape, dtype=np.float32):
    """Normal numbers."""
    return rng.normal(size=shape).astype(dtype)


def mxfp4(name, experts, rows, columns):
    """The two tensors of a file, and the values in the axes that transformers gives."""
    blocks = rng.integers(0, 256, (experts, rows, columns // 32, 16), np.uint8)
    scales = rng.integers(110, 140, blocks.shape[:-1], np.uint8)
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).astype(np.int64)
    sign, exponent, mantissa = codes >> 3, codes >> 1 & 3, codes & 1
    values = np.where(
        exponent == 0, mantissa / 2, (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    )
    values = (-1.0) ** sign * values
    values = values * 2.0 ** (scales[..., None, None].astype(np.int64) - 127)
    values = values.reshape(experts, rows, columns).swapaxes(1, 2)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}, values


def float8(name, *shape, block=(128, 128), dtype=np.float32):
    """The two tensors of a file, and the values."""
    codes = rng.normal(size=shape).astype(jnp.float8_e4m3fn)
    counts = [-(-size // b) for size, b in zip(shape[-2:], block, strict=True)]
    scales = rng.uniform(0.5, 2, (*shape[:-2], *counts)).astype(dtype)
    wide = np.repeat(np.repeat(scales, block[0], -2), block[1], -1)
    values = codes.astype(np.float32) * wide[..., : shape[-2], : shape[-1]]
    return {name: codes, f"{name}_scale_inv": scales}, values.astype(np.float32)


class Tensor:
    """A tensor as PyTorch has it: it needs two calls before NumPy sees it."""

    def __init__(self, array, dtype, ready=False):
        self.array, self.dtype, self.ready = array, f"torch.{dtype}", ready
        self.shape = array.shape

    def __getitem__(self, index):
        return Tensor(self.array[index], self.dtype[6:])

    def detach(self):
        return Tensor(self.array, self.dtype[6:])

    def cpu(self):
        return Tensor(self.array, self.dtype[6:], ready=True)

    def float(self):
        return Tensor(self.array.astype(np.float32), "float32", self.ready)

    def numpy(self):
        assert self.ready
        if self.dtype == "torch.bfloat16":
            raise TypeError("Got unsupported ScalarType BFloat16")
        return self.array
