"""What Graftree costs, beside raw JAX, Flax NNX and Equinox: ``python -m benchmarks``.

What is measured
    ``rows.py`` is the table of all measurements; a new one is a new line there.
    ``language_model_rows.py`` has those of the language model of ``examples/lm``,
    ``generation.py`` those of greedy decoding.
How
    ``groups.py`` has what a table is made of, ``gauges.py`` the clock and the other
    gauges; ``tables.py`` prints. ``libraries.py`` finds the peers that are installed.
    ``recorded.py`` writes and reads ``measured.json``, the figures that pages quote;
    ``printed/`` has what longer programs printed, which pages repeat.
The operations, written for each library on the same numbers
    ``perceptrons.py`` and ``blocks.py`` hold models and ``steps.py`` trains them;
    ``calls.py`` and ``lifted_calls.py`` call them, ``eager_layers.py`` calls layers,
    ``decoding.py`` decodes with a cache, ``forms.py`` takes models apart.
    ``gpts.py`` is a model worth tracing, ``language_models.py`` the model of
    ``examples/lm`` by hand, ``language_models_flax.py`` the same in Flax NNX.
What is not the time of an operation
    ``imports.py``, ``planned_memory.py``, ``fresh_models.py``, ``long_runs.py``;
    ``paths.py`` says what it costs that paths of modules are known.
Programs of their own
    ``accelerator.py`` for machines with one, ``weights.py`` for the loading of
    checkpoints, ``names.py`` for what nobody promises, ``reading.py`` for what a reader
    has to follow, ``issues/`` for problems that users of NNX libraries reported.
"""
