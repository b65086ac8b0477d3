"""Functions that JAX compiles.

- ``jit.py``: `jit`; ``stages.py``: what ``lower`` and ``compile`` of it return.
- ``partials.py``: `jit_partial` and `cached_partial`.
- ``compilations.py``: JAX compiles again what it doesn't trace again.
"""
