"""What a call costs, beside raw JAX, Flax NNX and Equinox: ``python -m benchmarks``.

``models.py`` has the operations that are timed, ``rows.py`` the table of them,
``timing.py`` the clock. A new measurement is a new line in ``rows.py``.
"""
