"""What people look at: displays of models.

- ``display.py``: objects in notebooks, drawn by treescope.
"""
