"""Keys and values of the tokens so far, so that none is computed twice.

A cache keeps all tokens or, with a window, the last ones in a ring. Each token has a
*place*: its position or, in a cache that is packed, its number among the tokens of its
row. The token at a place is in slot ``place % slots``. Places have no gaps, so the
newest one says which is in each slot; a packed cache keeps positions and segments too.

A chunk of several tokens may be longer than the ring: its first tokens then need
entries that its last ones replace. So they see the ring as it was, followed by the
chunk. A single token needs nothing that it replaces, and sees the ring as it is after.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from graftree import _jax, errors
from graftree.annotations import (
    Array,
    ArrayLike,
    Bool,
    Dtype,
    Int,
    Integer,
    Num,
    Shape,
    Shaped,
)
from graftree.core.modules.modules import Module
from graftree.core.objects import attributes
from graftree.core.text import descriptions
from graftree.core.variables.kinds import Cache
from graftree.nn import attention
from graftree.nn.attention_patterns import (
    AttentionPattern,
    KeysAndValues,
    Rule,
    is_rule,
)
from graftree.nn.support import arguments, meshes


class KeyValueCache(Module):
    """Keys and values of an attention layer, for a batch of sequences.

    The token at a position is kept in the slot of that number; with a window shorter
    than ``max_length``, in a ring of ``window`` slots. So the positions of a sequence
    start at 0, and leave out none: a token sees all slots up to its own. A token with a
    negative position is padding: it is not kept, and no token sees it.

    Args:
        batch: The number of sequences, or of rows of them.
        max_length: The number of slots for each.
        kv_heads: The number of heads of keys and values.
        head_dim: The features of a head.
        dtype: The dtype of keys and values: `nnx.precision.compute_dtype` of the layer,
            or a narrower one.
        window: How many tokens a token sees, itself included, as ``sliding_window`` of
            `nnx.dot_product_attention`; ``None``: all. With a window, each call must
            continue at the position after the last one, without gaps.
        value_head_dim: The features of a head of values; ``None``: ``head_dim``.
        packed: Whether a row holds several sequences, whose positions each start at 0:
            then each call says to which a token belongs. The slot of a token is its
            number among those of its row. With a window shorter than ``max_length``,
            a sequence must have ended before the next one begins.

    Attributes:
        key: Cache, ``[batch, slots, kv_heads, head_dim]``, with
            ``min(max_length, window)`` slots.
        value: Cache, ``[batch, slots, kv_heads, value_head_dim]``.
        positions, segment_ids: Cache, those of the tokens, ``int32[batch, slots]``, if
            packed; negative positions in empty slots. Else ``None``.
        count: Cache, how many tokens came so far, ``int32[batch]``, if packed.
        window: As given.
        is_ring: Whether the window is shorter than ``max_length``.

    Raises:
        ValueError: If the window is less than one.

    Example:
        >>> cache = nnx.decoding.KeyValueCache(2, 8, kv_heads=1, head_dim=4)
        >>> x = jnp.ones((2, 3, 1, 4))
        >>> positions = jnp.broadcast_to(jnp.arange(3), (2, 3))
        >>> key, value, mask = cache.extend(x, x, positions)
        >>> key.shape, mask.shape, mask[0, 0].sum(axis=-1)
        ((2, 8, 1, 4), (2, 1, 3, 8), Array([1, 2, 3], dtype=int32))

        With a window of two tokens, only two are kept:

        >>> cache = nnx.decoding.KeyValueCache(2, 8, kv_heads=1, head_dim=4, window=2)
        >>> key, value, mask = cache.extend(x, x, positions)
        >>> cache.key.shape, mask[0, 0].sum(axis=-1)
        ((2, 2, 1, 4), Array([1, 2, 2], dtype=int32))

    References:
        Jiang et al., 2023, "Mistral 7B", section 2, "Rolling Buffer Cache".
    """

    def __init__(
        self,
        batch: int,
        max_length: int,
        *,
        kv_heads: int,
        head_dim: int,
        dtype: Dtype = jnp.float32,
        window: int | None = None,
        value_head_dim: int | None = None,
        packed: bool = False,
    ):
        if window is not None and window < 1:
            raise ValueError(f"A KeyValueCache needs a window >= 1, got {window}.")
        slots = max_length if window is None else min(max_length, window)
        value_head_dim = head_dim if value_head_dim is None else value_head_dim
        self.key = Cache(jnp.zeros((batch, slots, kv_heads, head_dim), dtype))
        self.value = Cache(jnp.zeros((batch, slots, kv_heads, value_head_dim), dtype))
        self.window = window
        self.is_ring = slots < max_length
        self.positions = self.segment_ids = self.count = attributes.data(None)
        if packed:
            self.positions = Cache(jnp.full((batch, slots), -1, jnp.int32))
            self.segment_ids = Cache(jnp.zeros((batch, slots), jnp.int32))
            self.count = Cache(jnp.zeros((batch,), jnp.int32))

    def extend(
        self,
        key: Num[Array, "batch length kv_heads head_dim"],
        value: Num[Array, "batch length kv_heads value_head_dim"],
        positions: Int[Array, "batch length"],
        segment_ids: Int[Array, "batch length"] | None = None,
    ) -> tuple[
        Num[Array, "batch seen kv_heads head_dim"],
        Num[Array, "batch seen kv_heads value_head_dim"],
        Bool[Array, "batch 1 length seen"],
    ]:
        """Adds the keys and values of tokens; returns all that these tokens may see.

        Args:
            key: ``[batch, length, kv_heads, head_dim]``.
            value: ``[batch, length, kv_heads, value_head_dim]``.
            positions: Where in its sequence each token is, ``int[batch, length]``;
                negative for padding. Without a ring, a token beyond the last slot is an
                error, or in a trace, where positions are not known, not kept.
            segment_ids: To which sequence of its row each token belongs, if the cache
                is packed.

        Returns:
            Keys, values, and which of them each token sees, ``bool[batch, 1, length,
            seen]``: those at its own position and before, within the window. Keys and
            values are those of the slots; for several tokens and a ring, the earlier
            contents of the slots, followed by those of the tokens.

        Raises:
            ValueError: If the shapes don't fit the cache, if it has too few slots, or
                if it is packed and there are no segments, or the reverse.
        """
        keys = self.extended(key, value, positions, segment_ids)
        pattern = self._in_slots(AttentionPattern(positions, segment_ids))
        return keys.key, keys.value, pattern.options(key, keys)["mask"]

    def extended(
        self,
        key: Num[Array, "batch length kv_heads head_dim"],
        value: Num[Array, "batch length kv_heads value_head_dim"],
        positions: Int[Array, "batch length"],
        segment_ids: Int[Array, "batch length"] | None = None,
    ) -> KeysAndValues:
        """Adds tokens as `extend` does; returns keys and values with their positions.

        Its arguments and errors are those of `extend`.
        """
        self._check(key, value, positions, segment_ids)
        is_token = positions >= 0
        places = self._places(positions, is_token)
        if not self.is_ring:
            self._check_slots(places)
        none = jnp.iinfo(places.dtype).min  # for a call without tokens
        newest = places.max(axis=1, keepdims=True, initial=none)
        slots = self._slots_of(places, newest)
        count = is_token.sum(axis=1, keepdims=True)
        tokens = [key, value, positions]
        if self.count is not None:
            assert segment_ids is not None
            tokens.append(segment_ids)
            self.count[...] += count[:, 0].astype(self.count.dtype)
        if not self.is_ring or positions.shape[1] == 1:
            return KeysAndValues(*self._contents(self._write(tokens, slots), newest))
        before = [variable[...] for variable in self._by_token()]
        before = self._contents(before, newest - count)
        self._write(tokens, slots)
        return KeysAndValues(*_followed_by(before, tokens, is_token))

    def add(
        self, query: jax.Array, keys: KeysAndValues, pattern: AttentionPattern
    ) -> tuple[KeysAndValues, AttentionPattern]:
        """Adds the tokens of a call, for attention with a pattern.

        Args:
            query: ``[batch, length, heads, head_dim]``.
            keys: Those of the same tokens.
            pattern: Of the call, with positions.

        Returns:
            All keys and values, in the dtype of those of the call, and the pattern for
            them.

        Raises:
            ValueError: As `attend`.
        """
        if pattern.positions is None:
            raise ValueError("nnx.decoding.attend needs positions with a cache.")
        self._check_window(pattern.sliding_window)
        shape = keys.key.shape[:2]
        pattern = dataclasses.replace(
            pattern,
            positions=_of_tokens(pattern.positions, shape),
            segment_ids=_of_tokens(pattern.segment_ids, shape),
        )
        _check_prefix(pattern)
        pattern = dataclasses.replace(
            self._in_slots(pattern),
            mask=self._over_slots("mask", pattern.mask, query),
            bias=self._over_slots("bias", pattern.bias, query),
        )
        kept = self.extended(
            keys.key, keys.value, pattern.positions, pattern.segment_ids
        )
        # The dtype of a cache says how it keeps numbers, and not how to compute.
        key = kept.key.astype(keys.key.dtype)
        value = kept.value.astype(keys.value.dtype)
        return kept._replace(key=key, value=value), pattern

    def _in_slots(self, pattern: AttentionPattern) -> AttentionPattern:
        """The pattern, for the keys that `extended` returns."""
        window = self.window if self.is_ring else None
        is_plain = self.count is None and pattern.prefix_lengths is None
        # A single token sees all of a ring: none of it is later, or out of the window.
        is_causal = not (self.is_ring and is_plain and pattern.positions.shape[1] == 1)
        window = window if is_causal else None
        return dataclasses.replace(pattern, is_causal=is_causal, sliding_window=window)

    def _places(self, positions: jax.Array, is_token: jax.Array) -> jax.Array:
        """The places of tokens; negative for padding."""
        if self.count is None:
            return positions
        numbers = self.count[...][:, None] + jnp.cumsum(is_token, axis=1) - 1
        return jnp.where(is_token, numbers, -1)

    def _by_token(self) -> list[Cache[jax.Array]]:
        """What is kept of each token, in the order of `KeysAndValues`."""
        variables = [self.key, self.value, self.positions, self.segment_ids]
        return [variable for variable in variables if variable is not None]

    def _contents(self, kept: list[jax.Array], newest: jax.Array) -> list[jax.Array]:
        """What is kept, and the positions in the slots if these are not."""
        if self.positions is not None:
            return kept
        slots = self.key.shape[1]
        if not self.is_ring:
            return [*kept, jnp.arange(slots)[None]]
        return [*kept, _in_ring(newest, slots)]

    def _slots_of(self, places: jax.Array, newest: jax.Array) -> jax.Array:
        """The slots of tokens; -1 for those that are not kept."""
        if not self.is_ring:
            return places
        size = self.key.shape[1]
        is_kept = places > jnp.maximum(newest - size, -1)
        return jnp.where(is_kept, places % size, -1)

    def _check(self, key: Any, value: Any, positions: Any, segment_ids: Any) -> None:
        batch, _, *heads = self.key.shape
        expected = (batch, key.shape[1], *heads)
        expected_value = (*expected[:-1], self.value.shape[-1])
        if key.shape != expected or value.shape != expected_value:
            need = f"they need {expected} and {expected_value}"
            if expected == expected_value:
                need = f"both need {expected}"
            raise ValueError(
                f"KeyValueCache of shape {self.key.shape} can't take a key and a value "
                f"of shapes {key.shape} and {value.shape}; {need}."
            )
        for name, x in (("position", positions), ("segment", segment_ids)):
            if x is not None and x.shape != key.shape[:2]:
                raise ValueError(
                    f"KeyValueCache.extend needs a {name} for each of {key.shape[:2]} "
                    f"tokens, got {name}s of shape {x.shape}."
                )
        if (segment_ids is None) != (self.segment_ids is None):
            raise ValueError(
                "A packed KeyValueCache needs segment_ids, and any other cache takes "
                "none.\nPass segment_ids=... in the call, and make the cache with "
                "KeyValueCache(..., packed=True)."
            )

    def _check_window(self, window: int | None) -> None:
        if self.window != window:
            raise ValueError(
                f"nnx.decoding.attend got sliding_window={window} and a cache with "
                f"window={self.window}.\nMake the cache with KeyValueCache(..., "
                f"window={window})."
            )

    def _check_slots(self, places: Any) -> None:
        """Refuses more tokens than slots, and places that are known to have none."""
        slots, length = self.key.shape[1], places.shape[1]
        last = _last_known(places)
        if length <= slots and last < slots:
            return
        tokens = f"{length} tokens" if length > slots else f"a token at position {last}"
        raise ValueError(
            errors.message(
                f"A KeyValueCache with {slots} slots has no room for {tokens}.",
                way_out="Make it longer: KeyValueCache(batch, max_length, ...), with "
                "a max_length for the prompt, padding and new tokens.",
            )
        )

    def _write(self, tokens: list[jax.Array], slots: jax.Array) -> list[jax.Array]:
        """Writes tokens to their slots; those without one are left out.

        Returns:
            The contents of the cache, divided like the tokens.
        """
        rows = jnp.arange(slots.shape[0])[:, None]
        contents = []
        for variable, new in zip(self._by_token(), tokens, strict=False):
            old, new = meshes.together(variable[...], new.astype(variable.dtype))
            contents.append(
                old.at[rows, slots].set(
                    new,
                    mode="drop",
                    wrap_negative_indices=False,
                    **arguments.if_set(out_sharding=meshes.sharding_of(old)),
                )
            )
            variable[...] = contents[-1]
        return contents

    def _over_slots(self, name: str, x: Any, query: jax.Array) -> Any:
        """Checks that the last axis of a mask or bias is that of the slots, or one."""
        if x is None or is_rule(x):
            return x
        x, slots = jnp.asarray(x), self.key.shape[1]
        has_fixed_slots = not self.is_ring and self.count is None
        if x.shape[-1:] == (1,) or (x.shape[-1:] == (slots,) and has_fixed_slots):
            batch, length, heads = query.shape[:3]
            return attention.to_rank(name, x, (batch, heads, length, slots))
        words = f"{slots} slots, one for each position"
        way_out = (
            f"Give its last axis the size {slots}; a token's slot is its position."
        )
        if not has_fixed_slots:
            words = f"a ring of {slots} slots, whose tokens change from call to call"
            if not self.is_ring:
                words = "packed sequences, whose tokens fill slots in order of arrival"
            way_out = (
                f"Pass a function {name}(query_positions, key_positions); both are "
                "int[batch, queries] and int[batch, keys]."
            )
        raise ValueError(
            errors.message(
                f"nnx.decoding.attend: the {name} doesn't fit a cache with {words}.",
                where=f"{name} {descriptions.describe(x)}",
                way_out=way_out,
            )
        )


def _of_tokens(x: Any, shape: Shape) -> Any:
    """Gives each row what is said once for all, ``[length]``."""
    if x is None:
        return None
    x = jnp.asarray(x)
    return jnp.broadcast_to(x, shape) if x.shape == shape[1:] else x


def _last_known(positions: Any) -> int:
    """Returns the last of some positions, or -1 if this process can't read them."""
    if isinstance(positions, _jax.Tracer) or not positions.size:
        return -1
    if not getattr(positions, "is_fully_addressable", True):
        return -1
    return int(jax.device_get(positions).max())


def _in_ring(newest: jax.Array, slots: int) -> jax.Array:
    """Computes the position in each slot, negative where there is none yet.

    Args:
        newest: The newest position of each sequence, ``[batch, 1]``.
        slots: Their number.
    """
    return newest - (newest - jnp.arange(slots)[None]) % slots


def _followed_by(
    before: list[jax.Array], tokens: list[jax.Array], is_token: jax.Array
) -> list[jax.Array]:
    """The contents of a ring, and after them the tokens of a chunk."""
    contents = []
    for old, new in zip(before, tokens, strict=True):
        old, new = meshes.together(old, new.astype(old.dtype))
        if new.ndim > 2:
            # No mask can remove it again: padding may have become NaN in the layer
            # below.
            new = jnp.where(is_token[:, :, None, None], new, 0)
        contents.append(jnp.concatenate([old, new], axis=1))
    return contents


def _check_prefix(pattern: AttentionPattern) -> None:
    """Refuses a prefix that is known to go on in a later call."""
    lengths, segments = pattern.prefix_lengths, pattern.segment_ids
    arrays = [x for x in (pattern.positions, lengths, segments) if x is not None]
    if lengths is None or any(isinstance(x, _jax.Tracer) for x in arrays):
        return
    positions, lengths = np.asarray(pattern.positions), np.asarray(lengths)
    lengths = lengths if lengths.ndim == 2 else lengths[:, None]
    is_last = positions[:, None] == lengths[..., None] - 1
    if segments is not None:
        is_last &= np.asarray(segments)[:, None] == np.asarray(segments)[..., None]
    in_prefix = (positions >= 0) & (positions < lengths)
    if (in_prefix & ~is_last.any(axis=-1)).any():
        raise ValueError(
            errors.message(
                "nnx.decoding.attend: a call ends within a prefix, whose tokens see "
                "each other in both directions.",
                where=f"prefix_lengths {lengths[:, 0].tolist()}, positions up to "
                f"{positions.max(axis=1).tolist()}",
                way_out="Pass the whole prefix in one call; split only what follows.",
            )
        )


def attend(
    query: Num[Array, "batch length heads head_dim"],
    key: Num[Array, "batch length kv_heads head_dim"],
    value: Num[Array, "batch length kv_heads value_head_dim"],
    positions: Int[Array, "batch length"] | None = None,
    cache: KeyValueCache | None = None,
    *,
    sliding_window: int | None = None,
    is_causal: bool = True,
    segment_ids: Int[Array, "batch length"] | None = None,
    prefix_lengths: Int[Array, "*of_each"] | None = None,
    mask: Shaped[ArrayLike, "*mask_shape"] | Rule | None = None,
    bias: Num[ArrayLike, "*bias_shape"] | Rule | None = None,
    key_value_seq_lengths: Integer[ArrayLike, " batch"] | None = None,
    **options: Any,
) -> Num[Array, "batch length heads value_head_dim"]:
    """Computes causal attention for a language model, with or without a cache.

    One ``__call__`` then serves training, where a call has the whole sequence, and
    decoding, where it has the next tokens. The dtype of the cache doesn't change that
    of the result: keys and values come out of it in the dtype of the call's.

    Args:
        query: ``[batch, length, heads, head_dim]``.
        key: ``[batch, length, kv_heads, head_dim]``.
        value: ``[batch, length, kv_heads, value_head_dim]``.
        positions: Where in its sequence each token is; needed with a cache. Without
            one, tokens are in order, and padding on their left needs a ``mask``.
        cache: The cache to add keys and values to; ``None``: a token sees the tokens of
            the call, itself and those before.
        sliding_window: How many tokens a token sees, itself included; ``None``: all. It
            must be the window of the cache.
        is_causal: Always true: a token sees itself and those before.
        segment_ids: The number of the sequence that each token belongs to,
            ``int[batch, length]``, for several sequences in one row; a token sees its
            own. Positions then start at 0 in each. A cache must be ``packed``.
        prefix_lengths: How many tokens at the beginning of a sequence see each other in
            both directions, whatever the window, ``int[batch]``; or
            ``int[batch, length]``, for the sequence of each token. A call with a cache
            has all or none of them: this is checked where the numbers are known.
        mask: Which of them it sees, broadcastable to ``[batch, heads, length, keys]``.
            Keys are the tokens of the call or, with a cache, its slots, where a token
            is at its position. Or a function of the positions of queries and keys,
            ``int[batch | 1, length]`` and ``int[batch | 1, keys]``, that returns such a
            mask. A cache that is a ring or packed takes only a function, or a mask that
            is the same for all keys.
        bias: Added to the scaled dot products; an array or a function, as ``mask``.
        key_value_seq_lengths: How many tokens each sequence has; those at later
            positions are not seen.
        **options: Passed on to `nnx.dot_product_attention`, such as ``scale``.

    Returns:
        ``[batch, length, heads, value_head_dim]``.

    Raises:
        ValueError: If ``is_causal`` is false, if the windows differ, if a cache comes
            without positions or has too few slots, if ``mask`` or ``bias`` don't fit
            its slots, if the cache is packed and there are no ``segment_ids`` or the
            reverse, if a call is known to have a part of a prefix, or as for
            `KeyValueCache.extend` and `nnx.dot_product_attention`.

    Example:
        >>> x = jax.random.normal(jax.random.key(0), (1, 3, 1, 4))
        >>> y = nnx.decoding.attend(x, x, x)
        >>> cache = nnx.decoding.KeyValueCache(1, 8, kv_heads=1, head_dim=4)
        >>> tokens = [
        ...     nnx.decoding.attend(*[x[:, t : t + 1]] * 3, jnp.array([[t]]), cache)
        ...     for t in range(3)
        ... ]
        >>> jnp.allclose(jnp.concatenate(tokens, axis=1), y, atol=1e-6)
        Array(True, dtype=bool)
    """
    _check_causal(is_causal)
    keys = KeysAndValues(key, value, positions, segment_ids)
    pattern = AttentionPattern(
        positions,
        segment_ids,
        prefix_lengths,
        sliding_window=sliding_window,
        mask=mask,
        bias=bias,
    )
    with arguments.undone_on_failure(*(() if cache is None else vars(cache).values())):
        lengths = attention.checked_lengths(key_value_seq_lengths, query.shape[:1])
        if cache is None:
            options |= arguments.if_set(key_value_seq_lengths=lengths)
        else:
            keys, pattern = cache.add(query, keys, pattern)
            if lengths is not None:
                at: Any = keys.positions
                keys = keys._replace(positions=jnp.where(at < lengths[:, None], at, -1))
        options |= pattern.options(query, keys)
        return attention.dot_product_attention(query, keys.key, keys.value, **options)


def _check_causal(is_causal: bool) -> None:
    if not is_causal:
        raise ValueError(
            errors.message(
                "nnx.decoding.attend is causal, but got is_causal=False.",
                way_out="For attention in both directions, call "
                "nnx.dot_product_attention(query, key, value).",
            )
        )
