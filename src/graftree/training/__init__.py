"""What a training loop needs besides the model.

- ``optimizers.py``: an Optax transformation together with its state.
- ``misfits.py``: what is told when optimizer, model and gradients don't fit.
- ``metrics.py``: running statistics over batches.
- ``ema.py``: exponential moving averages of Variables.
- ``train_states.py``: the functional bundle of skeleton, params and optimizer state.
"""
