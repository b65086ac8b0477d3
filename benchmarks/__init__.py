"""What Graftree costs, beside raw JAX, Flax NNX and Equinox: ``python -m benchmarks``.

What is measured
    ``rows.py`` is the table of all measurements; a new one is a new line there.
    ``argument_rows.py`` is that of States and tuples as arguments,
    ``language_model_rows.py`` is that of the language model of ``examples/lm``,
    ``generation.py`` that of greedy decoding,
    ``accelerator.py`` a program of its own, for machines with an accelerator;
    ``weights.py`` likewise, for the loading of checkpoints.
    ``libraries.py`` finds the peers that are installed.
How
    ``gauges.py`` has the clock and the other gauges, ``tables.py`` prints.
The operations, written for each library on the same numbers
    ``perceptrons.py`` and ``blocks.py`` hold models, ``steps.py`` trains them,
    ``calls.py`` calls them, ``decoding.py`` decodes with a cache,
    ``forms.py`` takes models apart and ``construction.py`` makes them,
    ``gpts.py`` is a model worth tracing, ``language_models.py`` the model of
    ``examples/lm`` by hand, ``language_models_flax.py`` the same in Flax NNX.
What is not the time of an operation
    ``imports.py``, ``memory.py``, ``fresh_models.py``.
"""
