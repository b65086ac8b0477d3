"""All calls of Orbax: they write a tree, list its contents, read arrays.

Orbax is imported when it is first needed. While it works for us, we hold back its log:
a program that never asked for the log would see it on its screen.

    a folder that Orbax wrote
    ├── _METADATA              each leaf: its path, and the kind of its value
    ├── array_metadatas/       the layout of arrays, and the kind of random keys
    ├── _sharding, d/, ...     devices; the numbers
    └── _CHECKPOINT_METADATA   when it was begun and finished

A folder has its name only once it is whole: until then it is called
``<name>.orbax-checkpoint-tmp``.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import json
import logging
import os
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from graftree import errors
from graftree.core import paths
from graftree.sharding import collectives

DiskPath = tuple[str, ...]

PARTIAL = ".orbax-checkpoint-tmp"
TREE_FILE = "_METADATA"
STEP_FILE = "_CHECKPOINT_METADATA"
COMMITTED = "commit_success.txt"  # in object stores


def load() -> Any:
    """Imports ``orbax.checkpoint``, or says how to install it."""
    try:
        with quiet():
            import orbax.checkpoint
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("orbax"):
            raise
        raise ImportError(
            "nnx.checkpoints writes and reads with Orbax, which is not installed: "
            "pip install orbax-checkpoint"
        ) from error
    return orbax.checkpoint


def path_of(path: Any) -> Any:
    """Returns a path as Orbax takes it: absolute, without ``~``; remote ones as is."""
    load()
    from etils import epath

    is_path = isinstance(path, str | bytes | os.PathLike)
    text = os.fspath(path) if is_path else None
    if not isinstance(text, str) or not text:
        got = repr(path) if is_path or path is None else f"a {type(path).__name__}"
        raise TypeError(
            f"Expected the path of a folder, got {got}.\nThe path is the first "
            "argument; the objects come after it."
        )
    if "://" not in text:
        text = os.path.abspath(os.path.expanduser(text))
    return epath.Path(text)


def is_remote(folder: Any) -> bool:
    """Whether a path is that of an object store, where no folder can be renamed."""
    return "://" in os.fspath(folder)


def exists(folder: Any) -> bool:
    """Whether something is there.

    Raises:
        OSError: If this user may not know: then "no" would be a guess.
    """
    if is_remote(folder):
        return folder.exists()
    try:
        os.stat(folder)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


# ---------------------------------------------------------------- Orbax's log


class _Silence(logging.Filter):
    """Drops Orbax's log, unless the program asked for absl's log.

    Also drops asyncio's log about Orbax's other tasks when one of them has failed.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        if logging.getLogger("absl").level in (logging.DEBUG, logging.INFO):
            return True
        text = record.getMessage() if record.name == "asyncio" else record.pathname
        return not any(word in text for word in _NOISY)


# A logger of another class than absl's takes absl's own file for the caller.
_NOISY = ["tensorstore"] + [
    os.path.join(*x) for x in (("orbax", "checkpoint"), ("absl", "logging"))
]
_silence = _Silence()
_lock = threading.Lock()
_listeners = 0


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Holds back Orbax's log; its errors are raised, so nothing is lost."""
    silence(+1)
    try:
        yield
    finally:
        silence(-1)


def silence(change: int) -> None:
    """Counts the users of silence; the last one restores the loggers."""
    global _listeners
    # Import absl first: it makes its logger, which has a class of its own.
    with contextlib.suppress(ImportError):
        import absl.logging  # noqa: F401
    with _lock:
        _listeners += change
        for name in ("absl", "asyncio"):
            logger = logging.getLogger(name)
            if _listeners == 0:
                logger.removeFilter(_silence)
            else:
                logger.addFilter(_silence)


def let_threads_fail(seconds: float = 2.0) -> None:
    """Waits until the threads of a failed save have failed too, each with a log."""
    end = time.monotonic() + seconds
    for thread in threading.enumerate():
        if type(thread).__module__.startswith("orbax."):
            with contextlib.suppress(TimeoutError):  # which Orbax's own threads raise
                thread.join(max(0.0, end - time.monotonic()))


# ---------------------------------------------------------------- errors


@contextlib.contextmanager
def explained(action: str, folder: Any) -> Iterator[None]:
    """Turns any failure in the block into one error that says what and where."""
    with quiet():
        try:
            yield
        except errors.GraftreeError:
            raise
        except Exception as error:
            # Collect now, in silence: abandoned tasks complain when they go.
            traceback.clear_frames(error.__traceback__)
            gc.collect()
            raise explanation(action, folder, error) from error


def explanation(
    action: str, folder: Any, error: BaseException
) -> errors.CheckpointError:
    """Makes the error to raise in the place of one from Orbax or the file system."""
    error_number = getattr(error, "errno", None) or _errno_in(str(error))
    way_out = _WAYS_OUT.get(error_number or 0, "")
    if not way_out and action == READING:
        way_out = "Part of the checkpoint is missing or damaged: restore another one."
    first = (str(error).strip().splitlines() or [""])[0]
    explained = errors.CheckpointError(
        errors.message(
            f"{action} {folder} failed.",
            where=f"{type(error).__name__}: {first[:300]}",
            way_out=way_out,
        )
    )
    explained.errno = error_number
    return explained


READING = "Reading"
_WAYS_OUT = {
    errno.ENOSPC: "The disk is full. Everything written before is intact.",
    errno.EDQUOT: "The disk quota is used up. Everything written before is intact.",
    errno.EFBIG: "A file would be larger than this process (`ulimit -f`) or the "
    "file system allows.",
    errno.EROFS: "The file system is read-only: choose another folder.",
    errno.EACCES: "You have no permission to write or read there: choose another "
    "folder.",
    errno.EPERM: "You have no permission to write or read there: choose another "
    "folder.",
    errno.ENOTDIR: "Part of the path is a file: choose another folder.",
}


def _errno_in(text: str) -> int | None:
    """Finds the error number that TensorStore puts in the text of an error."""
    for error_number in _WAYS_OUT:
        if os.strerror(error_number) in text or errno.errorcode[error_number] in text:
            return error_number
    return None


# ---------------------------------------------------------------- writing


class StepWriter:
    """Writes folders, in a thread of Orbax; in all processes together.

    Args:
        handler: Orbax's handler of what is written.
        name: The call that writes, for messages.
    """

    def __init__(self, handler: Any, name: str) -> None:
        orbax = load()
        self.barriers = collectives.Barriers(name, f"orbax {next(_numbers)}")
        count = jax.process_count()
        # With their numbers, Orbax waits for the others by messages, which have a limit
        # of time, not by a computation of all devices.
        members = {*range(count)} if count > 1 else None
        self._checkpointer = orbax.AsyncCheckpointer(
            handler,
            async_options=orbax.AsyncOptions(
                create_directories_asynchronously=False,
                barrier_sync_fn=self.barriers.wait,
            ),
            multiprocessing_options=orbax.options.MultiprocessingOptions(
                active_processes=members
            ),
        )

    def begin(self, folder: Any, args: Any, note: Mapping[str, Any]) -> None:
        """Copies what is to be written, and begins to write it.

        Args:
            folder: Where to; it must not exist.
            args: Orbax's arguments for the handler.
            note: What `read_note` reads.
        """
        self._checkpointer.save(folder, args=args, custom_metadata=note or None)

    def finish(self) -> None:
        """Waits until all is on disk; if that fails here, it fails in all processes."""
        try:
            self._checkpointer.wait_until_finished()
        except BaseException as error:
            self.barriers.fail(error)
            raise

    def close(self) -> None:
        """Frees its threads."""
        self._checkpointer.close()


_numbers = itertools.count()


def write(
    folder: Any, tree: Mapping[str, Any], note: Mapping[str, Any], name: str
) -> None:
    """Writes a tree and returns when all of it is on disk.

    Args:
        folder: Where to; it must not exist.
        tree: Nested dicts of arrays.
        note: What `read_note` reads.
        name: The call, for messages.
    """
    orbax = load()
    writer = StepWriter(orbax.StandardCheckpointHandler(), name)
    try:
        writer.begin(folder, orbax.args.StandardSave(tree), note)
        writer.finish()
    finally:
        writer.close()


# ---------------------------------------------------------------- reading


def read_note(folder: Any) -> Mapping[str, Any]:
    """Reads the metadata saved beside the objects of a step (``custom_metadata``)."""
    file = folder / STEP_FILE
    if not file.exists():
        return {}
    return json.loads(file.read_text()).get("custom_metadata") or {}


class FolderContents(NamedTuple):
    """What a folder holds: the abstract arrays of its leaves, and their structure."""

    folder: Any
    treedef: Any  # as Orbax nests it
    leaves: dict[DiskPath, jax.ShapeDtypeStruct]  # in order; text has the dtype object
    numbers: set[DiskPath]  # the leaves that were Python numbers


def steps_in(folder: Any) -> list[int]:
    """Lists the steps of a folder that were written to the end, in order."""
    if not exists(folder):
        return []
    return sorted(int(x.name) for x in folder.iterdir() if is_step(x))


def is_step(folder: Any) -> bool:
    """Whether a folder is a step that was written to the end."""
    name = folder.name
    if not name.isdecimal() or str(int(name)) != name:
        return False
    if is_remote(folder):
        return (folder / COMMITTED).exists()
    return folder.is_dir()


def is_tree(folder: Any) -> bool:
    """Whether a folder holds one tree of arrays, written to the end."""
    return (folder / TREE_FILE).exists()


def read_contents(folder: Any) -> FolderContents:
    """Lists the contents of a folder; reads no array.

    Entries without numbers (``None``, empty containers) are left out: bookkeeping.

    Raises:
        CheckpointError: If a part of the folder is missing or damaged.
    """
    _check_whole(folder)
    items, treedef = jax.tree.flatten_with_path(_handler().metadata(folder).tree)
    implementations = _key_implementations(folder)
    leaves, numbers = {}, set()
    for jax_path, leaf in items:
        path = paths.spelled(paths.from_jax(jax_path))
        leaves[path] = _form_of(leaf, implementations.get(".".join(path)))
        if type(leaf).__name__ == "ScalarMetadata":
            numbers.add(path)
    return FolderContents(folder, treedef, leaves, numbers)


def _check_whole(folder: Any) -> None:
    """Raises if the tree file or the index of the arrays is damaged.

    Orbax would find out too, once for each array, all at the same time.
    """
    try:
        tree = json.loads((folder / TREE_FILE).read_text())
        if tree.get("use_ocdbt") and not is_remote(folder):
            import tensorstore

            base = {"driver": "file", "path": f"{folder}/"}
            spec = {"driver": "ocdbt", "base": base}
            index = {*tensorstore.KvStore.open(spec).result().list().result()}
            lost = [name for name in _array_names(tree) if name not in index]
            if lost:
                raise ValueError(f"{len(lost)} arrays are missing, such as {lost[0]}")
    except (ValueError, KeyError, AttributeError) as error:
        raise errors.CheckpointError(
            f"The checkpoint {folder} is damaged: part of it is missing or cut off.\n  "
            f"{type(error).__name__}: {str(error)[:300]}\nRestore another one."
        ) from error


def _array_names(tree: Any) -> list[bytes]:
    """Returns the names that the arrays of a tree file have in the index."""
    end = "zarr.json" if tree.get("use_zarr3") else ".zarray"
    return [
        f"{'.'.join(key['key'] for key in entry['key_metadata'])}/{end}".encode()
        for entry in tree["tree_metadata"].values()
        if entry["value_metadata"]["value_type"] in ("jax.Array", "np.ndarray")
    ]


def _handler() -> Any:
    """Makes a handler that reads every tree as dicts with strings as keys.

    Orbax can't read everything it writes: a Module with a list in it has keys of
    both kinds side by side.
    """
    orbax = load()
    base = orbax.BasePyTreeCheckpointHandler

    class Handler(base):
        async def _read_metadata_file(self, directory: Any) -> Any:
            metadata = await super()._read_metadata_file(directory)
            for entry in metadata.tree_metadata_entries:
                for key in entry.key_metadata.nested_key_metadata_entries:
                    key.key_type = type(key.key_type).DICT
            return metadata

    return orbax.PyTreeCheckpointHandler(handler_impl=Handler())


def _form_of(leaf: Any, implementation: str | None) -> jax.ShapeDtypeStruct:
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    if shape is None or dtype is None:
        return jax.ShapeDtypeStruct((), object)  # such as text
    if implementation is None:
        return jax.ShapeDtypeStruct(shape, dtype)
    key = jax.eval_shape(lambda: jax.random.key(0, impl=implementation))
    data = jax.eval_shape(jax.random.key_data, key)
    return jax.ShapeDtypeStruct(shape[: len(shape) - data.ndim], key.dtype)


def _key_implementations(folder: Any) -> dict[str, str]:
    """Reads the implementation of each stored random key, by its name in Orbax."""
    notes = folder / "array_metadatas"
    implementations: dict[str, str] = {}
    if not notes.exists():
        return implementations
    for file in notes.iterdir():
        for note in json.loads(file.read_text())["array_metadatas"]:
            note = note["array_metadata"]
            implementation = (note.get("ext_metadata") or {}).get("random_key_impl")
            if implementation is not None:
                implementations[note["param_name"]] = implementation
    return implementations


def read(
    contents: FolderContents, wanted: Mapping[DiskPath, Any]
) -> dict[DiskPath, Any]:
    """Reads arrays.

    Args:
        contents: The contents of the folder.
        wanted: For each path to read, a ``jax.ShapeDtypeStruct`` whose sharding the
            array gets; or ``None``, for a NumPy array.

    Returns:
        The arrays by path.
    """
    orbax = load()
    if not wanted:
        return {}

    def ask_for(path: DiskPath) -> tuple[Any, Any]:
        if path not in wanted:
            return orbax.PLACEHOLDER, orbax.RestoreArgs()
        target = wanted[path]
        if target is None:
            return 0, orbax.RestoreArgs(restore_type=np.ndarray)
        return target, orbax.ArrayRestoreArgs(
            sharding=target.sharding, dtype=target.dtype, global_shape=target.shape
        )

    asked = zip(*map(ask_for, contents.leaves), strict=True)
    item, how = map(contents.treedef.unflatten, asked)
    # Alone: it would wait for the others, though one of them may have failed.
    index = jax.process_index()
    alone = orbax.options.MultiprocessingOptions(
        primary_host=index, active_processes={index}
    )
    checkpointer = orbax.Checkpointer(_handler(), multiprocessing_options=alone)
    with checkpointer:
        args = orbax.args.PyTreeRestore(item=item, restore_args=how)
        read = checkpointer.restore(contents.folder, args=args)
    values = zip(contents.leaves, contents.treedef.flatten_up_to(read), strict=True)
    return {path: value for path, value in values if path in wanted}
