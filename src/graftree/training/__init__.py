"""What a training loop needs besides the model.

- ``optimizers.py``: an Optax transformation together with its state.
- ``step_checks.py``: errors for an optimizer, model and gradients that do not match.
- ``metrics/``: statistics of many batches.
- ``ema.py``: exponential moving averages of Variables.
- ``train_states.py``: skeleton, params and optimizer state as one immutable pytree.
"""
