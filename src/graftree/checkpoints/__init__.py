"""Saves models and whole training runs to disk, and restores them.

    nnx.checkpoints.save(folder, model)
    model = nnx.checkpoints.restore(folder, nnx.eval_shape(make_model))
    config = nnx.checkpoints.config(folder)  # if it was saved with one

    with nnx.checkpoints.Checkpoints(folder, every=100) as checkpoints:
        first = checkpoints.restore_latest(model=model, optimizer=optimizer) or 0
        for step in range(first + 1, 1001):
            ...
            checkpoints.save(step, model=model, optimizer=optimizer)

`load_state(model, state)` writes a state from any other checkpoint, strictly by path.
The files are Orbax's: ``pip install orbax-checkpoint``. If something does not fit, an
error lists all differences before anything is written.
"""

# The files of this folder:
#
# - `files.py`: one object in one folder, `save` and `restore`, and the description kept
#   with it, `config`; `configs.py`: this as JSON.
# - `series.py`: the steps of a training run, `Checkpoints`; the best of them;
#   `data_states.py`: the positions of data iterators, as JSON.
# - `stored_trees.py`: an object as a tree on disk, and back: it compares everything,
#   then reads; `orbax_side.py`: all calls of Orbax.
# - `step_contents.py`: what a step consists of; several processes settle it together.
# - `processes.py`: one writer at a time; the question whether to stop; no save is lost
#   when the program ends. How processes act together: `sharding/collectives.py`.
# - `strict_loading.py`: a state from anywhere into an object, all of it or an error.

from graftree import namespaces
from graftree.checkpoints.files import (
    config as config,
    restore as restore,
    save as save,
)
from graftree.checkpoints.series import Checkpoints as Checkpoints
from graftree.checkpoints.strict_loading import (
    Loaded as Loaded,
    load_state as load_state,
)

__dir__ = namespaces.lister(__name__)
