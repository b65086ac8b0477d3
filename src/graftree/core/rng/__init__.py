"""Streams of random keys.

- ``streams.py``: `Rngs` and `RngStream`: a key and a count each; a new key per call,
  of ``rngs.normal(...)`` and the rest of ``jax.random``, too.
- ``model_streams.py``: `split_rngs`, `fork_rngs`, `with_rngs`, `reseed`: the streams
  of a model, derived, saved, restored, reseeded.
"""
