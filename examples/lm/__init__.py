"""Trains a language model on real text, on one device or many, in one process or more.

Run it with ``python -m examples.lm``; ``--help`` lists the options.

- ``model``: the network.
- ``layouts``: what divides it, and its batches, over the devices.
- ``train``: the model with its optimizer, the loss, the training step.
- ``hlo``: what a compiled step sends between devices.
"""
