"""What the tests of checkpoints save: a data iterator, and the contents of objects."""

import jax
import numpy as np

import graftree as nnx


class Iterator:
    """Stands for an iterator over data."""

    def __init__(self, state=0):
        self.state = state

    def get_state(self):
        """All of it."""
        return self.state

    def set_state(self, state):
        """Puts it at another place."""
        self.state = state


def contents(obj, library=nnx):
    """The type, the shape and the bytes of each leaf, by path."""
    found = {}
    for path, leaf in jax.tree.leaves_with_path(library.as_pure(library.state(obj))):
        leaf = leaf[...] if isinstance(leaf, jax.Ref) else leaf
        dtype = getattr(leaf, "dtype", type(leaf))
        is_key = jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)
        array = np.asarray(jax.random.key_data(leaf) if is_key else leaf)
        found[jax.tree_util.keystr(path)] = str(dtype), array.shape, array.tobytes()
    return found
