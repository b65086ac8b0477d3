"""Random tensors, and what stands for PyTorch."""

import numpy as np

rng = np.random.default_rng(0)


def numbers(*shape, dtype=np.float32):
    """Normal numbers."""
    return rng.normal(size=shape).astype(dtype)


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
