"""Control flow inside compiled programs.

- ``scan.py``: `scan`; ``loops.py``: `while_loop`, `fori_loop`;
  ``loop_bodies.py``: what goes round in all three.
- ``cond_switch.py``: `cond`, `switch`.
"""
