"""Control flow inside compiled programs.

- ``scan.py``: `scan`; ``loops.py``: `while_loop`, `fori_loop`;
  ``loop_bodies.py``: a step of all three, and what goes round.
- ``cond_switch.py``: `cond`, `switch`.
"""
