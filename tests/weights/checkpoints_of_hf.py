"""The tiny checkpoints of Hugging Face in ``shared/hf``, beside this repository."""

import numpy as np
import pytest

from tests import sources


def folder(name):
    """The folder of one; skips the test where there is none."""
    for parent in sources.ROOT.resolve().parents:
        if (parent / "shared" / "hf" / name).is_dir():
            return parent / "shared" / "hf" / name
    pytest.skip("no shared/hf beside the repository")


def expected_of(checkpoint):
    """The arrays that the program it is from has made with it, by name."""
    with np.load(checkpoint / "expected.npz") as file:
        return {**file}
