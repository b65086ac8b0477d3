"""What layers share.

- ``arguments.py``: what layers are given: inputs to check, dtypes, sizes, axes and
  padding; state that comes back if a call fails; how constructors make Params and keep
  settings
- ``eager.py``: what makes eager calls fast
"""
