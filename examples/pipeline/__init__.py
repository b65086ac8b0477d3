"""A language model whose layers are on different devices: GPipe.

- ``pipeline.py``: the pipeline itself
- ``training.py``: a model with a pipeline inside, and its training step
- ``__main__.py``: ``python -m examples.pipeline``
"""
