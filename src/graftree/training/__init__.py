"""What a training loop needs besides the model.

    stopping = nnx.training.EarlyStopping(patience=10)
    log = nnx.training.RunLog("run.csv", resume=True)

Optimizers, metrics and averages are in the namespace ``nnx`` itself.
"""

# The files of this folder:
#
# - `optimizers.py`: an Optax transformation together with its state; `optax_forms.py`:
#   the containers in which Optax sees parameters, those of its masks; `step_checks.py`:
#   errors for an optimizer, model and gradients that do not match.
# - `metrics/`: statistics of many batches; `early_stopping.py`: which result is better,
#   and is it time to stop?
# - `run_logs.py`: metrics by step, on disk, exactly up to where a run is resumed;
#   `log_files.py`: JSON lines and CSV; `log_displays.py`: TensorBoard, progress.
# - `ema.py`: exponential moving averages of Variables.
# - `train_states.py`: skeleton, params and optimizer state as one immutable pytree.

from graftree import namespaces
from graftree.training.early_stopping import EarlyStopping as EarlyStopping
from graftree.training.run_logs import RunLog as RunLog

__dir__ = namespaces.lister(__name__)
