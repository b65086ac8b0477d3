"""Displays of models, for people to look at.

- ``displays.py``: objects in notebooks, drawn by treescope.
"""
