"""What models need on top of objects.

- ``modules.py``: `Module`; ``containers.py``: `List`, `Dict`, `Sequential`'s parent.
- ``recorders.py``: `sow` and `perturb`; ``capturing.py``: `capture`, which collects
  what they record and what methods return.
- ``views.py``: `view`, the same model with other flags.
- ``refs.py``: a model with its Variables in array refs, or without.
"""
