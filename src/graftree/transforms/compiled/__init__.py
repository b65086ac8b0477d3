"""Functions that JAX compiles.

- ``jit.py``: `jit`, `jit_partial` and `cached_partial`.
- ``stages.py``: the results of ``lower`` and ``compile``.
"""
