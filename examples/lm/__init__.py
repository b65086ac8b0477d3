"""Trains a language model on real text, on one device or many, in one process or more.

Run it with ``python -m examples.lm``; ``--help`` lists the options. ``python -m
examples.lm.compare`` lays runs side by side. To read it, start at ``experiment``, which
tells the whole story in order:

- ``__main__``: the command line; ``settings``: what its options mean together.
- ``processes``: the same command in several processes, as on a cluster.
- ``experiment``: make or restore, train, save, report, write text.
- ``data``: the books, their batches, and the part that is held out.
- ``model``: the network.
- ``layouts``: what divides it, and its batches, over the devices.
- ``train``: the model with its optimizer, the loss, the training step.
- ``loops``: the loop around that step; ``restacking``: checkpoints of the other form.
- ``samples``: text that the model writes.
- ``curves``: what a run leaves behind; ``compare``: several of these.
- ``simulate``: the step on devices that aren't there; ``published``: runs of others.
- ``progress``: the live display; ``report``: tables and pictures.
"""
