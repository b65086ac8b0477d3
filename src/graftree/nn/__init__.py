"""Layers: Modules with Params, and the functions between them.

- ``support/``: what layers share; ``initializers``, ``activations``
- ``linear``, ``einsum``, ``conv``, ``conv_transpose``: contractions with a kernel
- ``embed``: table look-up
- ``moments``: mean and variance; ``normalization``, ``group_normalization``: the layers
  that use them
- ``dropout``, ``pooling``: random zeros, window reductions
- ``pooling_layers``: pooling as Modules
- ``recurrent_cells``, ``single_state_cells``, ``lstm_cells``: one step of time;
  ``recurrent``, ``bidirectional``: sequences of them
- ``lora``: low-rank adaptation; ``reparametrization``: weights that are normalized
- ``masks``, ``attention``, ``rope``: who looks at whom, dot-product attention, rotary
  positions; ``multi_head_attention``, ``key_value_caches``: the layer, how it decodes
"""
