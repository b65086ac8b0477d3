"""Writes, killed before each of their operations on files in turn.

``python -m tests.stress.weights_kills`` does it for a file and for sets, over nothing
and over an older one, and prints how many kills there were; a number lets it do only
the first kinds. After each one, the folder must have
all of the old tensors or all of the new ones; or, while a set replaces one whose files
have the same names, nothing that can be read. A write after the kill must work, and
leave nothing of the killed one.
"""

import functools
import pathlib
import sys
import tempfile

import numpy as np

from graftree import errors
from graftree.weights import saving, sources, stored_tensors
from tests.stress import starts

WATCHED = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir")


def write(folder, value, count, shard_bytes):
    """Writes tensors that are all of one value."""
    array = np.full(10, value, np.float32)
    stored = stored_tensors.Stored(array.dtype, array.shape)
    outs = [saving.NewTensor(f"{i}", stored, lambda: array) for i in range(count)]
    saving.write(folder, outs, shard_bytes=shard_bytes)


def value_in(folder):
    """The value of the tensors there; None if nothing can be read."""
    try:
        with sources.open(folder) as source:
            arrays = [source.read(name, [slice(None)]) for name in source.tensors]
            values = {float(value) for array in arrays for value in array}
    except errors.WeightsError:
        return None
    (value,) = values
    return value


def kills(old, new, allowed):
    """How many operations there were; after each, the folder is as it may be."""
    for number in range(1, 1000):
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name) / "model"
            if old:
                write(folder, 1.0, *old)
            rewrite = functools.partial(write, folder, 2.0, *new)
            if not starts.killed_at(number, rewrite, WATCHED):
                assert value_in(folder) == 2.0
                return number - 1
            assert value_in(folder) in allowed, (number, [*folder.iterdir()])
            write(folder, 3.0, *new)
            assert value_in(folder) == 3.0 and not [*folder.glob("*.partial")]
    raise AssertionError("it never ends")


ONE, THREE, TWO = (3, None), (3, 40), (4, 80)

# What is there, what is written, and what may be there after a kill.
KINDS = {
    "a file over a file": (ONE, ONE, (1.0, 2.0)),
    "a set over one of the same names": (THREE, THREE, (1.0, 2.0, None)),
    "a set over one of other names": (TWO, THREE, (1.0, 2.0)),
    "a set over nothing": (None, THREE, (None, 2.0)),
}


def main(number=None):
    """Prints how often each kind of write was killed."""
    for name, kind in [*KINDS.items()][:number]:
        print(kills(*kind), name)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
