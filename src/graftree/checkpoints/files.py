"""One object in one folder: `save`, `restore`, `config`; how folders are found."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax

from graftree import errors
from graftree.checkpoints import configs, orbax_side, processes, stored_trees
from graftree.sharding import collectives

T = TypeVar("T")

# The folders that a `save` with ``overwrite=True`` keeps beside its own as it works.
NEW, OLD = ".graftree-new", ".graftree-old"


def save(
    path: str | os.PathLike[str],
    obj: Any,
    *,
    overwrite: bool = False,
    config: Any = None,
) -> None:
    """Saves an object to a folder; returns when all of it is on disk.

    Stores what ``nnx.state(obj)`` lists, in the layout of Orbax checkpoints of
    `flax.nnx`: a shared Variable once, an array ref as its content. It does not store
    the structure: `restore` takes that from an object. In a program of several
    processes, all must call it.

    Args:
        path: The folder; may be relative, begin with ``~``, or be remote
            (``gs://...``). Its parents are made.
        obj: A Module, State, Optimizer, Rngs, metric, Variable, or another pytree of
            arrays and numbers; also tuples, lists and dicts of them.
        overwrite: Whether to replace a checkpoint at this path. At every moment a whole
            checkpoint is on disk, which `restore` finds.
        config: A description to keep with it, such as the arguments of the model's
            constructor, which `config` returns: ``None``, booleans, numbers, strings,
            and lists, tuples and dicts of these.

    Raises:
        CheckpointError: If the folder exists, or can't be written; or if another writer
            saves to it.
        TypeError: If a leaf, or a part of ``config``, can't be stored; lists all such
            paths, and nothing is written.
        ValueError: If two paths have the same name on disk, or one has none.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp() + "/model"
        >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> nnx.checkpoints.save(folder, model)
        >>> other = nnx.Linear(2, 3, rngs=nnx.Rngs(1))
        >>> restored = nnx.checkpoints.restore(folder, other)
        >>> bool(jnp.all(restored.kernel[...] == model.kernel[...]))
        True
    """
    to_store: list[Any] = []

    def prepare() -> tuple[str, Any]:
        description = configs.to_json(config, _SAVE)
        folder = orbax_side.path_of(path)
        stored = stored_trees.to_store(obj, "save")
        if overwrite and orbax_side.is_remote(folder):
            raise ValueError(
                f"{_SAVE} can't overwrite {folder}: an object store can't replace a "
                "folder in one step.\nSave to another path, and delete this one "
                "afterwards."
            )
        to_store[:] = folder, stored.tree, configs.as_note(description)
        return stored.digest, description

    everyone = collectives.gathered(_SAVE, prepare)
    stored_trees.check_digests([digest for digest, _ in everyone])
    configs.check_same([description for _, description in everyone])
    folder, tree, note = to_store
    lock = processes.lock_of(folder)

    def enter() -> bool:
        lock.take()
        _finish_swap(folder)
        exists = folder.exists()
        if exists:
            _check_replaceable(folder, overwrite)
        return exists

    try:
        exists = collectives.by_first(_SAVE, enter)
        _write(folder, tree, note, exists)
    finally:
        lock.release()


_SAVE = "nnx.checkpoints.save"


def _write(
    folder: Any, tree: Mapping[str, Any], note: Mapping[str, Any], exists: bool
) -> None:
    """Writes a tree to a folder, which changes at once if it exists."""
    beside = folder.parent / (folder.name + NEW) if exists else folder
    partial = beside.parent / (beside.name + orbax_side.PARTIAL)

    def write() -> None:
        with orbax_side.explained("Saving to", folder):
            orbax_side.write(beside, tree, note, _SAVE)

    def swap() -> None:
        with orbax_side.explained("Saving to", folder):
            # Until its renaming, the new one is whole, and `restore` looks for it.
            folder.rename(folder.parent / (folder.name + OLD))
            _finish_swap(folder)

    collectives.by_first(_SAVE, lambda: _remove(partial))
    try:
        collectives.together(_SAVE, write)
    except BaseException:
        # Others may still write there, and would not end; the next save removes it.
        if jax.process_count() == 1:
            _remove(partial)
        raise
    if exists:
        collectives.by_first(_SAVE, swap)


def _check_replaceable(folder: Any, overwrite: bool) -> None:
    """Raises if a folder that exists may not be replaced."""
    if not overwrite:
        problem, way_out = "exists", "Pass overwrite=True to replace it, or choose"
    elif orbax_side.is_tree(folder):
        return
    elif folder.is_dir() and not any(folder.iterdir()):
        return
    else:
        problem, way_out = "is not a checkpoint, so it was not replaced", "Choose"
    raise errors.CheckpointError(
        f"nnx.checkpoints.save: {folder} {problem}.\n{way_out} another path."
    )


def _finish_swap(folder: Any) -> None:
    """Puts the new folder in the place of one that was moved, and deletes leftovers."""
    if orbax_side.is_remote(folder):
        return
    new, old = (folder.parent / (folder.name + end) for end in (NEW, OLD))
    with orbax_side.explained("Saving to", folder):
        if new.exists() and not folder.exists():
            new.rename(folder)
        _remove(new)
        _remove(old)


def _remove(folder: Any) -> None:
    if folder.exists():
        folder.rmtree()


# ---------------------------------------------------------------- restoring


def restore(
    path: str | os.PathLike[str],
    like: T,
    *,
    missing: Any = None,
    unexpected: Any = None,
    cast: bool = False,
) -> T:
    """Reads an object from a folder.

    All paths, shapes and dtypes are compared before any array is read. Arrays go
    straight onto the shardings of ``like``, or the default device where it has none,
    however many devices and processes there were when they were saved.

    Args:
        path: What `save` wrote; or a checkpoint of a State, a Module, an Optimizer or a
            pure dict from a program for `flax.nnx`; or the folder of a step with
            several objects, for a dict of them.
        like: An object with the structure to restore, concrete or abstract
            (`nnx.eval_shape`, `nnx.get_abstract_model`). It is not changed.
        missing: Which leaves of ``like`` may be missing on disk; the new object gets
            copies of their values. A pattern of paths such as ``"head.**"``, a class
            such as `nnx.LoRAParam`, a function of path and leaf, ``...`` for all, or a
            list of these. ``None`` for none.
        unexpected: Which leaves on disk may be left there; in the same forms.
        cast: Whether dtypes may differ: arrays get those of ``like``, of the same kind
            (floating, complex, integer). An integer that does not fit is an error.

    Returns:
        A new object like ``like``, with the saved values.

    Raises:
        CheckpointError: If there is no whole checkpoint, or it can't be read.
        StateMismatchError: If the checkpoint does not fit; lists all differences.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp() + "/rngs"
        >>> rngs = nnx.Rngs(0)
        >>> nnx.checkpoints.save(folder, rngs)
        >>> abstract = nnx.eval_shape(lambda: nnx.Rngs(1))
        >>> bool(nnx.checkpoints.restore(folder, abstract).params() == rngs.params())
        True
    """
    allowed = {"missing": missing, "unexpected": unexpected, "cast": cast}
    objects: Any = like

    def find() -> Any:
        return _by_first(_RESTORE, lambda: _readable(orbax_side.path_of(path)))

    def read(folder: Any) -> Any:
        def compare() -> tuple[Any, bool]:
            return _compare(folder, like, allowed)

        restored, is_single = collectives.together(_RESTORE, compare)
        stored_trees.read_all(_RESTORE, restored)
        new = {name: each.rebuilt() for name, each in restored.items()}
        return new[""] if is_single else {name: new[name] for name in objects}

    return steadily(_RESTORE, find, read)


_RESTORE = "nnx.checkpoints.restore"


def _compare(
    folder: Any, like: Any, allowed: Mapping[str, Any]
) -> tuple[dict[str, stored_trees.Restored], bool]:
    """Compares the objects of a folder with ``like``; says whether it has just one."""
    message = (
        f"nnx.checkpoints.restore: {folder} does not fit the {type(like).__name__}."
    )
    items = items_of(folder)
    if items is not None and [*items] == [_ONLY] and not _has_names(like, items):
        folder, items = items[_ONLY], None
    if items is None:
        return stored_trees.compare({"": folder}, {"": like}, message, **allowed), True
    if not _has_names(like, items):
        raise errors.CheckpointError(
            f"{folder} has several objects: {', '.join(sorted(items))}.\nPass the "
            f"folder of one of them, e.g. {items[min(items)]}, or a dict with all of "
            "them."
        )
    return stored_trees.compare(items, like, message, **allowed), False


# The name that Orbax's manager gives to the only object of a step.
_ONLY = "default"


def _has_names(like: Any, items: Mapping[str, Any]) -> bool:
    return isinstance(like, dict) and set(like) == set(items)


# ---------------------------------------------------------------- descriptions


def config(path: str | os.PathLike[str]) -> Any:
    """Returns the description that was saved with a checkpoint.

    With it, a program makes the model whose weights it then restores. In a program of
    several processes, all must call it.

    Args:
        path: What `save` wrote; or the folder of a `Checkpoints`, which stands for its
            newest step, of a step, or of an object in a step.

    Returns:
        A new object, equal to what was given as ``config``; ``None`` if nothing was,
        or an earlier version has written it.

    Raises:
        CheckpointError: If there is no whole checkpoint, or it can't be read.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp() + "/model"
        >>> config = {"in_features": 2, "out_features": 3, "use_bias": False}
        >>> model = nnx.Linear(**config, rngs=nnx.Rngs(0))
        >>> nnx.checkpoints.save(folder, model, config=config)
        >>> config = nnx.checkpoints.config(folder)
        >>> make = lambda: nnx.Linear(**config, rngs=nnx.Rngs(0))
        >>> again = nnx.checkpoints.restore(folder, nnx.eval_shape(make))
        >>> again.bias is None, bool(jnp.all(again.kernel[...] == model.kernel[...]))
        (True, True)
    """

    def find() -> Any:
        return _by_first(_CONFIG, lambda: _with_note(orbax_side.path_of(path)))

    def read(folder: Any) -> Any:
        with orbax_side.explained(orbax_side.READING, folder):
            return collectives.together(_CONFIG, lambda: orbax_side.read_note(folder))

    return configs.from_note(steadily(_CONFIG, find, read))


_CONFIG = "nnx.checkpoints.config"


def _with_note(folder: Any) -> Any:
    """Finds the folder that has the note: this one, its newest step, or its step."""
    folder = _readable(folder)
    with orbax_side.explained(orbax_side.READING, folder):
        if orbax_side.is_tree(folder):
            is_in_step = not (folder / orbax_side.STEP_FILE).exists()
            return folder.parent if is_in_step else folder
        if folder.is_dir() and (steps := orbax_side.steps_in(folder)):
            return folder / str(steps[-1])
    items_of(folder)  # raises, unless it is a step
    return folder


# ---------------------------------------------------------------- folders


def _by_first(name: str, find: Callable[[], Any]) -> Any:
    """Has the first process look for a folder, which all will read."""

    def look() -> str:
        return os.fspath(find()) if collectives.is_first() else ""

    [text, *_] = collectives.gathered(name, look)
    return orbax_side.path_of(text)


def steadily(name: str, find: Callable[[], Any], read: Callable[[Any], T]) -> T:
    """Reads a folder, and again if another program replaces it during the reading.

    Another program may delete or replace the folder. A read across such a change could
    be damaged, or mix two checkpoints and still look whole.

    Args:
        name: The call, for messages.
        find: Finds the folder to read; called again after a change.
        read: Reads it; if it fails in one process, it fails in all.

    Raises:
        CheckpointError: If it changes each time.
    """
    cause: Exception | None = None
    for _ in range(_ATTEMPTS):
        folder = find()
        token = _identity(folder)
        results = list[T]()
        cause = None
        try:
            results.append(read(folder))
        except errors.ProcessError:
            raise
        except Exception as error:
            cause = error
        changes = collectives.gathered(name, lambda: _identity(folder) != token)  # noqa: B023
        if not any(changes):
            if cause is not None:
                raise cause
            return results[0]
    raise errors.CheckpointError(
        f"Reading {folder} failed: it was deleted or replaced during the read.\n"
        "Read it again, or make its writer keep more steps."
    ) from cause


_ATTEMPTS = 10


def _identity(folder: Any) -> Any:
    """Returns a key that identifies a folder; ``None`` if nothing is there."""
    if orbax_side.is_remote(folder):
        return (folder / orbax_side.COMMITTED).exists()
    try:
        status = os.stat(folder)
    except OSError:
        return None
    # File numbers are reused, so the key includes the time when it became whole.
    return status.st_dev, status.st_ino, status.st_mtime_ns


def _readable(folder: Any) -> Any:
    """Finds the folder to read for a path: itself, or what a killed swap has left."""
    with orbax_side.explained(orbax_side.READING, folder):
        if orbax_side.exists(folder):
            return folder
        new = folder.parent / (folder.name + NEW)
        if not orbax_side.is_remote(folder) and new.exists():
            return new
        partial = folder.parent / (folder.name + orbax_side.PARTIAL)
        if partial.exists():
            problem = f"{folder} holds an incomplete checkpoint."
        else:
            problem = f"There is no checkpoint at {folder}: the path does not exist."
        raise errors.CheckpointError(problem + _beside(folder))


def _beside(folder: Any) -> str:
    """Lists the folders to choose from, as a line of a message."""
    parent = folder.parent
    if orbax_side.is_remote(folder):
        return ""
    if not parent.is_dir():
        return f"\nIts parent is not a folder: {parent}."
    names = sorted(path.name for path in parent.iterdir() if orbax_side.is_tree(path))
    return f"\nIts parent contains: {', '.join(names[:10])}." if names else ""


def items_of(folder: Any) -> dict[str, Any] | None:
    """Lists the folders of a step's objects by name; ``None`` for a single tree."""
    with orbax_side.explained(orbax_side.READING, folder):
        if orbax_side.is_tree(folder):
            return None
        folders = [x for x in folder.iterdir() if x.is_dir()] if folder.is_dir() else []
        items = {x.name: x for x in folders if orbax_side.is_tree(x)}
        if items and (folder / orbax_side.STEP_FILE).exists():
            return items
    steps = sorted(int(x.name) for x in folders if x.name.isdecimal())
    lack = f"it has no {orbax_side.TREE_FILE}" if folder.is_dir() else "it is a file"
    raise errors.CheckpointError(
        f"{folder} is not a complete checkpoint: {lack}.\n"
        + (
            f"It contains steps: restore {folder / str(steps[-1])}."
            if steps
            else "Pass a path written by nnx.checkpoints.save or by Orbax."
        )
    )
