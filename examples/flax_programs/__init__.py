"""Ten programs written for Flax NNX, which run on Flax and, unchanged, on Graftree.

``python -m examples.flax_programs`` runs each on both, one after the other in
processes of their own, and prints whether the losses agree and what each took;
``python -m examples.flax_programs vae`` runs one. A single program is run by
``python examples/flax_programs/vae.py`` on Flax, and by
``python -m graftree.dropin examples/flax_programs/vae.py`` on Graftree.

The programs import ``flax.nnx`` and know nothing of Graftree. Each has

- ``build()``: a tuple of what is trained: models, optimizers, streams;
- ``train(*built)``: an iterator over the losses, one per step;
- ``GOAL``: what the mean of the last ten losses falls below.
"""
