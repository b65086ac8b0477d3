"""Functions that JAX compiles.

- ``jit.py``: `jit`; ``stages.py``: what ``lower`` and ``compile`` of it return.
- ``partials.py``: `jit_partial` and `cached_partial`.
"""
