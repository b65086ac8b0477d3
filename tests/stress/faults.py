"""What can't be read or written: ``python -m tests.stress.faults`` prints the messages.

`READS` makes each kind of folder that can't be read as the model that is asked for;
`DAMAGES` changes one file of a good checkpoint. Each must give one error of ours, with
the path, and leave the objects of the caller as they were; or, where the file isn't
needed, the right values.

`WRITES` are places where nothing can be written. Nothing may be lost there, and no part
of a checkpoint may be left.

Run by hand, it prints the messages of reads and writes, and fills a disk (in memory,
which takes root).
"""

import collections
import contextlib
import os
import pathlib
import pickle
import resource
import shutil
import subprocess
import tempfile
import zipfile

import jax
import jax.numpy as jnp
import numpy as np

import graftree as nnx
from graftree import checkpoints, errors
from tests.stress import kills


def good_model(seed=0):
    """What is saved, and asked for."""
    return nnx.Linear(40, 50, rngs=nnx.Rngs(seed))


# ---------------------------------------------------------------- what can't be read


def nothing(path):
    """There is nothing."""


def plain_file(path):
    """A file, where a folder should be."""
    path.write_text("hello")


def empty_folder(path):
    """A folder with nothing in it."""
    path.mkdir()


def other_files(path):
    """A folder of something else."""
    path.mkdir()
    (path / "notes.txt").write_text("hello")
    (path / "more").mkdir()


def numpy_file(path):
    """Arrays that NumPy saved."""
    with path.open("wb") as file:
        np.savez(file, kernel=np.ones((40, 50)), bias=np.ones(50))


def torch_file(path):
    """What torch.save writes: a zip with a pickle, and numbers."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"weight": 1}))
        archive.writestr("archive/data/0", bytes(8000))


def other_model(path):
    """A checkpoint of a model with other layers."""
    checkpoints.save(path, nnx.Conv(3, 4, (2, 2), rngs=nnx.Rngs(0)))


def other_shape(path):
    """A checkpoint of a wider layer."""
    checkpoints.save(path, nnx.Linear(40, 51, rngs=nnx.Rngs(0)))


def other_dtype(path):
    """A checkpoint in half precision."""
    model = nnx.Linear(40, 50, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    checkpoints.save(path, model)


def plain_dict(path):
    """What Orbax saved of a dict that is no model."""
    import orbax.checkpoint as orbax

    with orbax.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, {"weights": [np.ones(3)], "epoch": 3})


def unfinished(path):
    """What a killed save left: the folder with the name of a part."""
    checkpoints.save(path, good_model())
    path.rename(path.with_name(path.name + ".orbax-checkpoint-tmp"))


READS = [
    *(nothing, plain_file, empty_folder, other_files, numpy_file, torch_file),
    *(other_model, other_shape, other_dtype, plain_dict, unfinished),
]


# ---------------------------------------------------------------- damaged files


def cut(file):
    """The second half is missing."""
    os.truncate(file, file.stat().st_size // 2)


def remove(file):
    """The file is gone."""
    file.unlink()


def flip(file):
    """One bit is another, in the middle."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0x10
    file.write_bytes(bytes(data))


def empty(file):
    """Nothing is in it, as after a crash of the machine."""
    file.write_bytes(b"")


DAMAGES = [cut, remove, flip, empty]


def files_of(folder):
    """Its files, by a name that is the same in each checkpoint."""
    found = {}
    counts = collections.Counter()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = str(file.relative_to(folder))
        if len(file.name) == 32:  # of TensorStore, by chance
            name = str(file.relative_to(folder).parent / "*")
        counts[name] += 1
        found[f"{name} {counts[name]}" if counts[name] > 1 else name] = file
    return found


# ---------------------------------------------------------------- what must hold


def numbers(obj):
    """All values as bytes."""
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(nnx.state(obj))]


def tried(action, path, objects):
    """The message of the error of ours that an action gives; ``None`` without one.

    Raises:
        AssertionError: If it is another one, does not name the path, or comes after
            something was changed.
    """
    before = numbers(objects)
    try:
        action()
    except (errors.CheckpointError, errors.StateMismatchError) as error:
        message = str(error)
        assert str(path) in message, f"does not name {path}: {message}"
        assert numbers(objects) == before, f"changed before: {message}"
        return message
    return None


def all_tried(path, objects, *actions):
    """What `tried` gives for each action."""
    return [tried(action, path, objects) for action in actions]


def read_fault(path):
    """The message for a path that can't be read."""
    model = good_model(1)
    message = tried(lambda: checkpoints.restore(path, model), path, model)
    assert message is not None, f"{path} was restored"
    return message


def damage_of_step(folder, name, damage):
    """Damages a file of the only step of a series, and restores it.

    Returns:
        The message, or ``None`` if all values were right, or ``"wrong values"``.
    """
    model, position = good_model(1), kills.Position()
    objects = {"model": model, "position": position}
    damage(files_of(folder)[name])
    with checkpoints.Checkpoints(folder) as kept:
        message = tried(lambda: kept.restore_latest(**objects), folder, model)
    if message is not None:
        assert position.state["position"] == -1, "the position was changed"
        return message
    is_right = numbers(model) == numbers(good_model(0))
    return None if is_right and position.state["position"] == 5 else "wrong values"


def good_series(folder):
    """A series with one step."""
    position = kills.Position()
    position.state["position"] = 5
    with checkpoints.Checkpoints(folder) as kept:
        kept.save(5, model=good_model(), position=position)


# ---------------------------------------------------------------- what can't be written


@contextlib.contextmanager
def files_limited(size):
    """No file may become larger: to a process what a full disk is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def read_only(folder):
    """Nobody may write to a folder; root, whom modes don't hinder, is somebody else."""
    is_root = os.geteuid() == 0
    folder.chmod(0o555)
    if is_root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)
        folder.chmod(0o755)


NOBODY = 65534


def array_of(size):
    """A model of one array, which can't be compressed."""
    numbers = np.random.default_rng(size).random(size, np.float32)
    return nnx.Dict(weight=nnx.Param(jnp.asarray(numbers)))


def write_too_much(folder, context=contextlib.nullcontext):
    """Saves what has no room, and what has; returns the messages.

    Args:
        folder: Where there is room for some kilobytes, but not for 4 megabytes.
        context: Within which that is so.

    Raises:
        AssertionError: If a checkpoint is lost, or a part of one is left.
    """
    small, big = array_of(10), array_of(1_000_000)
    single, other, series = (folder / name for name in ("single", "other", "series"))
    checkpoints.save(single, small)
    with context(), checkpoints.Checkpoints(series, keep=1, best="loss") as kept:

        def keep(step, model):
            # The best that is whole is 1, in the place of which nothing comes.
            kept.save(step, model=model, scores={"loss": (0, -1)[model is big]})
            kept.wait()

        messages = all_tried(
            folder,
            small,
            lambda: checkpoints.save(other, big),
            lambda: checkpoints.save(single, big, overwrite=True),
            lambda: keep(1, small),
            lambda: keep(2, big),
            lambda: keep(2, small),
        )
        assert kept.best_step() == 1, f"the best step is {kept.best_step()}"
        for path in (single, series / "1" / "model", series / "2" / "model"):
            read = checkpoints.restore(path, array_of(10))
            assert numbers(read) == numbers(small), f"{path} has other values"
    saved = [message is None for message in messages]
    assert saved == [False, False, True, False, True], messages
    left = sorted(path.name for path in [*folder.iterdir(), *series.iterdir()])
    assert left == ["1", "2", "series", "single"], f"left behind: {left}"
    return [message for message in messages if message is not None]


def single_and_series(folder):
    """Both kinds of checkpoints in a folder, and a model that fits the first."""
    model = array_of(10)
    checkpoints.save(folder / "single", model)
    good_series(folder / "series")
    return folder / "single", folder / "series", model


def write_where_forbidden(folder):
    """Saves into a folder that is read-only; returns the messages."""
    single, series, model = single_and_series(folder)
    series.chmod(0o555)
    before = sorted(folder.rglob("*"))
    with read_only(folder):
        with checkpoints.Checkpoints(series) as kept:
            messages = all_tried(
                folder,
                model,
                lambda: checkpoints.save(folder / "other", model),
                lambda: checkpoints.save(single, model, overwrite=True),
                lambda: checkpoints.Checkpoints(folder / "new").save(1, model=model),
                lambda: kept.save(6, model=model),
            )
        checkpoints.restore(single, model)
    series.chmod(0o755)
    assert None not in messages and sorted(folder.rglob("*")) == before, messages
    return messages


def read_where_forbidden(folder):
    """Reads what this user may not read; returns the messages."""
    single, series, model = single_and_series(folder)
    single.chmod(0)
    series.chmod(0)
    with read_only(folder):
        messages = all_tried(
            folder,
            model,
            lambda: checkpoints.restore(single, model),
            lambda: checkpoints.restore(series / "5" / "model", model),
            lambda: checkpoints.Checkpoints(series).restore_latest(x=model),
            lambda: checkpoints.Checkpoints(single / "x").restore_latest(),
        )
    single.chmod(0o755)
    series.chmod(0o755)
    assert None not in messages, f"read: {messages}"
    return messages


def write_over_what_is_not_ours(folder):
    """Saves over, below, and as a series into what is no checkpoint; the messages."""
    model = array_of(10)
    file, other = folder / "file", folder / "other"
    plain_file(file)
    other_files(other)
    before = sorted(folder.rglob("*"))
    messages = all_tried(
        folder,
        model,
        lambda: checkpoints.save(file, model),
        lambda: checkpoints.save(file, model, overwrite=True),
        lambda: checkpoints.save(other, model, overwrite=True),
        lambda: checkpoints.save(file / "below", model),
        lambda: checkpoints.Checkpoints(file).save(1, model=model),
        lambda: checkpoints.Checkpoints(file).restore_latest(model=model),
        lambda: checkpoints.Checkpoints(file / "below").save(1, model=model),
    )
    assert None not in messages and sorted(folder.rglob("*")) == before, messages
    return messages


WRITES = {
    "no file may be larger than 1 MB": lambda folder: write_too_much(
        folder, lambda: files_limited(1_000_000)
    ),
    "the folder is read-only": write_where_forbidden,
    "the folder can't be read": read_where_forbidden,
    "something else is there": write_over_what_is_not_ours,
}


# ---------------------------------------------------------------- by hand


@contextlib.contextmanager
def small_disk(folder, megabytes):
    """Mounts a disk of some megabytes, in memory; only root may."""
    size = f"size={megabytes}m"
    subprocess.run(["mount", "-t", "tmpfs", "-o", size, "none", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


def main():
    """Prints each message."""
    with tempfile.TemporaryDirectory() as name:
        top = pathlib.Path(name)
        top.chmod(0o755)
        for make in READS:
            make(top / make.__name__)
            print(f"\n{make.__doc__}\n  {read_fault(top / make.__name__)}")
        for title, write in WRITES.items():
            _print_writes(title, write, top / "writes")
        if os.geteuid() == 0:
            (top / "disk").mkdir()
            with small_disk(top / "disk", 3):
                _print_writes("the disk is full", write_too_much, top / "disk" / "x")


def _print_writes(title, write, folder):
    folder.mkdir()
    print(f"\nIf {title}:")
    for message in write(folder):
        print("  " + message.replace("\n", "\n  "))
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
