"""Layers: Modules with Params, and the functions between them.

- ``support/``: the shared code of layers
- ``initializers``: functions that layers take; ``activations``: the one with a Param
- ``linear``, ``conv``: contractions with a kernel, and look-up; convolutions
- ``normalization``: the layers; ``moments``: mean, variance and how layers use them
- ``dropout``, ``pooling``: random zeros; windows or images reduced
- ``cells``: one time step; ``recurrent``: sequences of them, in both directions
- ``attention``, ``rope``: dot-product attention and its masks, rotary positions;
  ``rope_scaling``: these for long texts; ``position_biases``: T5's and ALiBi's;
  ``attention_patterns``: which keys a query sees, by positions; ``caches``: keys and
  values of the tokens so far
- ``multi_head_attention``: the layer; ``own_caches``: the cache that is part of it;
  ``latent_attention``: the one whose keys and values come from a small vector
- ``compute_dtypes``: the dtype of a layer's results; of its Params; ``own_params``:
  Params that the code of users reads as something else
- ``lora``: low-rank adaptation; ``reparametrization``: weights that are normalized
- ``mixtures/``: routers, and experts that get the tokens sent to them
- ``sequential``: one layer after the other
"""
