"""Where the tests keep compiled programs: on disk for ever, in memory for a while.

JAX's own cache of compiled programs writes an entry in place. Whoever reads it
meanwhile, another process or another thread, gets half of it, and JAX warns. Here an
entry has its name only once it is whole.
"""

import ctypes
import gc
import os
import pathlib
import resource
import tempfile
import threading
import zlib

import jax
from jax._src import compilation_cache
from jax._src.interpreters import mlir

# Of this repository, whichever folder a program that a test starts runs in.
FOLDER = pathlib.Path(__file__).parents[1] / "out" / "jax-cache" / jax.__version__
STEP = 300_000_000  # bytes
USES = 100
_bound = 2_200_000_000  # to forget them takes seconds: of the process, and to reload
_loaded = {}


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
    FOLDER.mkdir(parents=True, exist_ok=True)
    compilation_cache.compress_executable = lambda entry: zlib.compress(entry, level=1)
    compilation_cache.decompress_executable = zlib.decompress
    jax.config.update("jax_compilation_cache_dir", str(FOLDER))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # Not that of XLA for GPUs: to name its folder takes as long as to find a program.
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
    _load_once()


def _load_once():
    """Keeps the entries of a test file loaded: most equal programs are in one file."""
    load, keep = (
        compilation_cache.get_executable_and_time,
        compilation_cache.put_executable_and_time,
    )

    def load_once(key, *args, **kwargs):
        if key not in _loaded:
            executable, seconds = load(key, *args, **kwargs)
            if executable is None:
                return None, None
            _loaded[key] = executable, seconds
        return _loaded[key]

    def keep_loaded(key, name, executable, backend, seconds):
        _loaded[key] = executable, seconds
        keep(key, name, executable, backend, seconds)

    compilation_cache.get_executable_and_time = load_once
    compilation_cache.put_executable_and_time = keep_loaded


def share_contexts():
    """Makes JAX write `USES` programs in one context of MLIR, in each thread.

    JAX 0.10.2 makes one for each program, which takes as long as all the rest before
    that is compiled; later ones make one for ten.
    """
    make, kept = mlir.make_ir_context, threading.local()

    def shared():
        kept.uses = getattr(kept, "uses", 0) + 1
        if kept.uses % USES == 1:
            kept.context = make()
        return kept.context

    mlir.make_ir_context = shared


def forget_those_of_a_file():
    """Forgets what is loaded."""
    _loaded.clear()


def keep_within_bound():
    """Forgets all programs when they have taken much more memory."""
    global _bound
    if memory() > _bound:
        _loaded.clear()
        jax.clear_caches()
        gc.unfreeze()  # see conftest.py
        gc.collect()
        gc.freeze()
        ctypes.CDLL(None).malloc_trim(0)  # else the process keeps what is free
        _bound = max(_bound, memory() + STEP)


def memory():
    """How many bytes this process has in memory; elsewhere than on Linux: none."""
    try:
        pages = pathlib.Path("/proc/self/statm").read_text().split()[1]
    except FileNotFoundError:
        return 0
    return int(pages) * resource.getpagesize()
