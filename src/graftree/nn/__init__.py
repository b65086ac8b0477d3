"""Layers: Modules with Params, and the functions between them.

- ``promotion``: the common dtype of a computation; ``initializers``, ``activations``
- ``parameters``: how every layer makes and reads its Params
- ``linear``, ``conv``, ``embed``: contractions with a kernel, table look-up
- ``moments``: mean and variance; ``normalization``, ``group_normalization``: the layers
  that use them
- ``dropout``, ``pooling``: random zeros, window reductions
"""
