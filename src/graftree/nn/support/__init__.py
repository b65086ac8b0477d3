"""What layers share.

- ``parameters.py``: how layers make and read Params; ``promotion.py``: the dtype of a
  computation; ``operations.py``: JAX's functions, looked up when called.
- ``arguments.py``: sizes, axes, padding; ``checks.py``: what inputs must be.
- ``rollbacks.py``: state that comes back if a call fails.
"""
