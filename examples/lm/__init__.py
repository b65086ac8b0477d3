"""Trains a language model on real text, on one device or many, in one process or more.

Run it with ``python -m examples.lm``; ``--help`` lists the options.

- ``model``: the network.
"""
