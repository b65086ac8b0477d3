"""Random programs over objects, run in several ways that must agree.

- `vocabulary`: the names that programs use; its text begins every reproduction.
- `generator`, `bodies`: programs from a seed, as lists of statements.
- `plain`: what the transforms mean in plain Python; the expected results.
- `records`: what is noted of a run, and how two notes differ.
- `running`: runs a program as plain Python, and with each mode; makes it smaller.

``python -m tests.differential --help`` says how to run many of them.
"""
