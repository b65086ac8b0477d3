"""Programs for problems that users of NNX libraries reported: docs/look_up/issues.md.

Each runs on Flax NNX as it stands, and on Graftree by `python -m graftree.dropin`. It
prints its figures, one on a line; ``python -m benchmarks.issues`` runs all of them on
both, each in a process of its own, and prints the table.
"""
