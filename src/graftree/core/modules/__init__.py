"""What models need on top of objects.

- ``modules.py``: `Module`, and `view`, the same model with other flags;
  ``containers.py``: `List`, `Dict`, `Sequential`'s parent.
- ``capturing.py``: `sow` and `perturb`; `capture`, which collects their records and
  the outputs of methods.
- ``refs.py``: a model with its Variables in array refs, or without.
"""
