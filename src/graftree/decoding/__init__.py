"""Continues prompts with a language model, token by token.

    made = nnx.decoding.generate(model, [[3, 1, 4], [9]], max_new_tokens=16)
    made.lists()                                    # the new tokens of each prompt

    for part in nnx.decoding.stream(model, [[3, 1, 4]], max_new_tokens=16):
        part.lists()                                # the same tokens, as they are made

Prompts of different lengths go through one compiled program with a cache of keys and
values, `KeyValueCache`. The default takes the likeliest token;
``sampler=nnx.decoding.Sampler(temperature=0.8, top_k=40)`` draws instead, and
``processors=`` are functions that change the logits first.
"""

# generation.py    prompts in, tokens out, in compiled programs
# beam_search.py   the sequences that are likeliest as a whole
# speculative.py   a small model drafts tokens, the large one checks them
# tasks.py         what a call asks for: prompts, stops, processors, checked
# steps.py         calls of the model: the prompts, then token by token
# sampling.py      the next token, from logits; functions that change logits first
# ../nn/caches.py  keys and values of the tokens so far; attention with and without them

from graftree import namespaces
from graftree.decoding.beam_search import beam_search as beam_search
from graftree.decoding.generation import (
    Generated as Generated,
    generate as generate,
    stream as stream,
)
from graftree.decoding.sampling import (
    History as History,
    RepetitionPenalty as RepetitionPenalty,
    Sampler as Sampler,
)
from graftree.decoding.speculative import speculate as speculate
from graftree.nn.attention_patterns import KeysAndValues as KeysAndValues
from graftree.nn.caches import KeyValueCache as KeyValueCache, attend as attend

__dir__ = namespaces.lister(__name__)
