"""What people look at: displays of models.

- ``displays.py``: objects in notebooks, drawn by treescope.
"""
