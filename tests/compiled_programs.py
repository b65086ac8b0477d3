"""Compiled programs in a folder that several processes write to at once.

JAX's own cache of compiled programs writes an entry in place. Whoever reads it
meanwhile, another process or another thread, gets half of it, and JAX warns. Here an
entry has its name only once it is whole.
"""

import os
import pathlib
import tempfile

from jax._src import compilation_cache


class WholeFiles:
    """Entries by key, each in a file of its own (JAX's ``CacheInterface``)."""

    def __init__(self, folder):
        self._path = pathlib.Path(folder)

    def get(self, key):
        """Returns the entry, or None if there is none yet."""
        try:
            return (self._path / key).read_bytes()
        except FileNotFoundError:
            return None

    def put(self, key, value):
        """Adds an entry; of several equal ones, the last stays."""
        handle, unnamed = tempfile.mkstemp(dir=self._path)
        with open(handle, "wb") as file:
            file.write(value)
        os.replace(unnamed, self._path / key)


def keep_in_whole_files():
    """Makes JAX keep its compiled programs that way, in this process."""
    # A JAX that has moved this function fails here, and not at random.
    assert callable(compilation_cache.get_file_cache)
    compilation_cache.get_file_cache = lambda folder: (WholeFiles(folder), folder)
