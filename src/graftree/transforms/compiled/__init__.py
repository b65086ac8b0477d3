"""Functions that JAX compiles.

- ``jit.py``: `jit`, `jit_partial` and `cached_partial`.
- ``stages.py``: what ``lower`` and ``compile`` return.
"""
