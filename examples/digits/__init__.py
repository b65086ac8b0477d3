"""Trains a small convolutional network on real handwritten digits.

Run it with ``python -m examples.digits``; ``--help`` lists the options. The file to
read is ``digits``: the data, the network and its training. The rest is what a program
that people run has around it:

- ``__main__``: the command line.
- ``experiment``: trains, saves, reports, restores and compares.
- ``report``: the live display, the tables and the pictures.
"""
