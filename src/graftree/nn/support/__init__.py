"""What layers share.

- ``arguments.py``: what layers are given: inputs to check, sizes, axes and padding
- ``parameters.py``: how layers make Params; ``first_values.py``: what is in them
- ``computation.py``: operands in one dtype; calls of JAX's functions
- ``eager_steps.py``: eager calls of functions that take long to say what they compute
- ``rollbacks.py``: state that comes back if a call fails
"""
