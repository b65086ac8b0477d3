"""Streams of random keys.

- ``streams.py``: `Rngs` and `RngStream`: a key and a count each; a new key per call.
- ``distributions.py``: ``rngs.normal(...)`` and the rest of ``jax.random``.
- ``splitting.py``: `split_rngs`, `fork_rngs`, `with_rngs`: streams inside a model.
- ``reseeding.py``: the keys of those streams, saved, restored, seeded anew.
"""
