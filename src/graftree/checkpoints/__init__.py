"""Saves models and whole trainings to disk, and restores them.

    nnx.checkpoints.save(folder, model)
    model = nnx.checkpoints.restore(folder, nnx.eval_shape(make_model))

    with nnx.checkpoints.Checkpoints(folder, every=100) as checkpoints:
        first = checkpoints.restore_latest(model=model, optimizer=optimizer) or 0
        for step in range(first + 1, 1001):
            ...
            checkpoints.save(step, model=model, optimizer=optimizer)

`load_state(model, state)` writes what any other checkpoint gave, strictly by path. The
files are Orbax's: ``pip install orbax-checkpoint``. What does not fit is an error that
lists all differences, before anything is written.
"""

# The files of this folder:
#
# - `files.py`: one object in one folder, `save` and `restore`; `readings.py`: all is
#   compared, then read.
# - `series.py`: the steps of a training run, `Checkpoints`; `data_states.py`: the
#   positions of data iterators, as JSON; `preemption.py`: is it time to stop?
#   `endings.py`: no save is lost when the program ends.
# - `layouts.py`: an object as a tree on disk, and back; `stored_leaves.py`: one leaf
#   of it; `orbax_side.py`: all that we ask of Orbax; `processes.py`: what several
#   processes do together; `locks.py`: one writer at a time.
# - `loading.py`: a state from anywhere into an object, strictly.

from graftree import namespaces
from graftree.checkpoints.files import restore as restore
from graftree.checkpoints.files import save as save
from graftree.checkpoints.loading import Loaded as Loaded
from graftree.checkpoints.loading import load_state as load_state
from graftree.checkpoints.series import Checkpoints as Checkpoints

__dir__ = namespaces.lister(__name__)
