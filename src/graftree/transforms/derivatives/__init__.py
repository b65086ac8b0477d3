"""Derivatives with respect to objects.

- ``grad.py``: `grad`, `value_and_grad`, `remat`; ``vjp_jvp.py``: `vjp`, `jvp`.
- ``custom_vjp.py``: `custom_vjp`.
- ``cotangents.py``: the form of derivatives, checked and rebuilt.
"""
