"""Continues prompts with a language model, token by token.

    made = nnx.decoding.generate(model, [[3, 1, 4], [9]], max_new_tokens=16)
    made.lists()                                    # the new tokens of each prompt

Prompts of different lengths go through one compiled program with a cache of keys and
values, `KeyValueCache`. Without more the likeliest token is taken;
``sampler=nnx.decoding.Sampler(temperature=0.8, top_k=40)`` draws instead.
"""

# All is in `generation.py`: prompts in, tokens out, in one compiled program; the choice
# of the next token; and keys and values of the tokens so far.

from graftree import namespaces
from graftree.decoding.generation import (
    Generated as Generated,
    KeyValueCache as KeyValueCache,
    Sampler as Sampler,
    generate as generate,
)

__dir__ = namespaces.lister(__name__)
