"""What models need on top of objects.

- ``modules.py``: `Module`; ``containers.py``: `List`, `Dict`, `Sequential`'s parent.
- ``recorders.py``: `sow` and `perturb`; ``output_recorders.py``: methods that record
  what they return; ``capturing.py``: `capture`, which collects all that.
- ``views.py``: `view`, the same model with other flags.
- ``refs.py``: a model with its Variables in array refs, or without.
"""
