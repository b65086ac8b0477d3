"""Layers: Modules with Params, and the functions between them.

- ``promotion``: the common dtype of a computation; ``initializers``, ``activations``
- ``arguments``: sizes, axes, padding; ``parameters``: how layers make and read Params
- ``linear``, ``einsum``, ``conv``, ``conv_transpose``: contractions with a kernel
- ``embed``: table look-up
- ``moments``: mean and variance; ``normalization``, ``group_normalization``: the layers
  that use them
- ``dropout``, ``pooling``: random zeros, window reductions
"""
