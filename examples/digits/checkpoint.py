"""The model on disk, as an Orbax checkpoint of its state.

At every moment a complete checkpoint is on disk once there has been one: the new one is
written beside the old one, and takes its place only when it is whole.
"""

import logging
import pathlib
import shutil

from orbax import checkpoint as orbax

import graftree as nnx

# Orbax narrates each save through absl's logger, in the middle of our own output.
logging.getLogger("absl").setLevel(logging.ERROR)


def save(model: nnx.Module, folder: pathlib.Path) -> None:
    """Writes the state of ``model`` to ``folder``, in place of what is there.

    Args:
        model: The model to save; it is not changed.
        folder: Where to; its parent must exist.
    """
    fresh = folder.with_name(folder.name + ".new")
    with orbax.StandardCheckpointer() as checkpointer:
        # Orbax takes absolute paths only. `force` clears what a killed run left here.
        checkpointer.save(fresh.absolute(), nnx.state(model), force=True)
    previous = folder.with_name(folder.name + ".old")
    shutil.rmtree(previous, ignore_errors=True)
    if folder.exists():
        folder.rename(previous)
    fresh.rename(folder)
    shutil.rmtree(previous, ignore_errors=True)


def restore(model: nnx.Module, folder: pathlib.Path) -> None:
    """Fills ``model`` in place with the values saved in ``folder``.

    Args:
        model: A model of the class and sizes that were saved; its own values are lost.
        folder: What ``save`` wrote.
    """
    with orbax.StandardCheckpointer() as checkpointer:
        nnx.update(model, checkpointer.restore(folder.absolute(), nnx.state(model)))
