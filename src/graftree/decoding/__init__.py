"""Text, token by token: the public sub-module `nnx.decoding`.

- ``caches.py``: keys and values of the tokens so far.
- ``sampling.py``: which token comes next, of logits.
- ``generation.py``: prompts in, tokens out, in one compiled program.

The public names are in the table below, and nothing is imported before one is used.
"""

from __future__ import annotations

import typing

from graftree import lazy_names

# For each file its public names. Type checkers read imports, below the table.
PUBLIC: dict[str, str] = {
    "caches": "KeyValueCache",
    "generation": "Generated generate",
    "sampling": "Sampler",
}

if typing.TYPE_CHECKING:
    from graftree.decoding.caches import KeyValueCache as KeyValueCache
    from graftree.decoding.generation import Generated as Generated
    from graftree.decoding.generation import generate as generate
    from graftree.decoding.sampling import Sampler as Sampler


__getattr__, __dir__ = lazy_names.functions_of(__name__, PUBLIC)
