"""Continues prompts with a language model, token by token.

    made = nnx.decoding.generate(model, [[3, 1, 4], [9]], max_new_tokens=16)
    made.lists()                                    # the new tokens of each prompt

Prompts of different lengths go through one compiled program with a cache of keys and
values, `KeyValueCache`. Without more the likeliest token is taken;
``sampler=nnx.decoding.Sampler(temperature=0.8, top_k=40)`` draws instead.
"""

# All is in `generation.py`: prompts in, tokens out, in one compiled program; the choice
# of the next token; and keys and values of the tokens so far.
#
# The public names are in the table below, and nothing is imported before one is used.

from __future__ import annotations

import typing

from graftree import lazy_names

# For each file its public names. Type checkers read imports, below the table.
PUBLIC: dict[str, str] = {
    "generation": "Generated KeyValueCache Sampler generate",
}

if typing.TYPE_CHECKING:
    from graftree.decoding.generation import Generated as Generated
    from graftree.decoding.generation import KeyValueCache as KeyValueCache
    from graftree.decoding.generation import Sampler as Sampler
    from graftree.decoding.generation import generate as generate


__getattr__, __dir__ = lazy_names.functions_of(__name__, PUBLIC)
