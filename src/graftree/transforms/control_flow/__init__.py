"""Control flow inside compiled programs.

- ``loops.py``: `scan`, `while_loop`, `fori_loop`; ``loop_bodies.py``: a step of all
  three, and the carried values.
- ``cond_switch.py``: `cond`, `switch`.
"""
