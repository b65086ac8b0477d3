"""Trains a small convolutional network on real handwritten digits.

Run it with ``python -m examples.digits``; ``--help`` lists the options. To read it,
start at ``experiment``, which tells the whole story in order:

- ``__main__``: the command line.
- ``experiment``: train, save, report, restore and compare.
- ``data``: the digits, their split and their batches.
- ``models``: the network.
- ``train``: the training step and the loop around it.
- ``progress``: the live display of that loop.
- ``report``: tables and pictures.
"""
