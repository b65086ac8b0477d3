"""Scalings of rotary positions, under the names that configurations give them.

A model that has been trained on short texts reads longer ones if its pairs turn more
slowly. Each kind is a function; its keywords are the keys that Hugging Face writes into
``rope_scaling`` or, since transformers 5, ``rope_parameters``. It returns how far each
pair turns from one position to the next, ``[pairs]``, and a factor of the rotated
features. With a parameter ``length``, the former depends on the length of the sequence,
an array ``[*batch, 1]``, and has the shape ``[*batch, pairs]``.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from graftree import errors
from graftree.core.hashable_mappings import HashableMapping


def default(theta: float, size: int) -> Any:
    """Pair ``i`` turns by ``theta**(-2 * i / size)`` (Su et al., 2021)."""
    return theta ** (-np.arange(0, size, 2) / size), 1.0


def linear(theta: float, size: int, *, factor: float) -> Any:
    """As if positions were divided by the factor (Chen et al., 2023, eq. 4)."""
    return default(theta, size)[0] / factor, 1.0


def proportional(
    theta: float, size: int, *, factor: float = 1.0, partial_rotary_factor: float = 1.0
) -> Any:
    """Only the first pairs turn; the others are half a head apart all the same."""
    is_turning = np.arange(size // 2) < partial_rotary_factor * size // 2
    return np.where(is_turning, default(theta, size)[0] / factor, 0.0), 1.0


def dynamic(
    theta: float,
    size: int,
    length: jax.Array,
    *,
    factor: float,
    max_position_embeddings: int,
) -> Any:
    """NTK: ``theta`` grows with what a sequence is longer than those of training."""
    excess = jnp.maximum(length / max_position_embeddings, 1) - 1
    steps = np.arange(0, size, 2) / max(size - 2, 1)
    growth = (1 + factor * excess) ** -_as_row(steps, length)
    return _as_row(default(theta, size)[0], length) * growth, 1.0


def yarn(
    theta: float,
    size: int,
    *,
    original_max_position_embeddings: int,
    factor: float | None = None,
    max_position_embeddings: int | None = None,
    attention_factor: float | None = None,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    mscale: float | None = None,
    mscale_all_dim: float | None = None,
    truncate: bool = True,
) -> Any:
    """Slows down the pairs that turn less than ``beta_fast`` times in training.

    Those below ``beta_slow`` turns are slowed down by the whole factor (Peng et al.,
    2023, eq. 17 to 22).
    """
    factor = factor or _ratio(max_position_embeddings, original_max_position_embeddings)

    def pair_with(turns: float) -> float:
        wavelength = original_max_position_embeddings / turns
        return size * math.log(wavelength / (2 * math.pi)) / (2 * math.log(theta))

    def amplitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

    first, last = pair_with(beta_fast), pair_with(beta_slow)
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    slowed = np.clip((np.arange(size // 2) - first) / ((last - first) or 0.001), 0, 1)
    if attention_factor is None:
        attention_factor = amplitude(1)
        if mscale and mscale_all_dim:
            attention_factor = amplitude(mscale) / amplitude(mscale_all_dim)
    return default(theta, size)[0] * (1 - slowed + slowed / factor), attention_factor


def llama3(
    theta: float,
    size: int,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: int,
) -> Any:
    """As YaRN, but by the number of turns, and without a factor of attention."""
    frequencies = default(theta, size)[0]
    turns = original_max_position_embeddings * frequencies / (2 * math.pi)
    kept = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)
    kept = np.clip(kept, 0, 1)
    return frequencies * (kept + (1 - kept) / factor), 1.0


def longrope(
    theta: float,
    size: int,
    length: jax.Array,
    *,
    short_factor: Sequence[float],
    long_factor: Sequence[float],
    original_max_position_embeddings: int,
    factor: float | None = None,
    max_position_embeddings: int | None = None,
    attention_factor: float | None = None,
) -> Any:
    """Has a factor for each pair, others for long texts (Ding et al., 2024, eq. 2)."""
    original = original_max_position_embeddings
    factor = factor or _ratio(max_position_embeddings, original)
    for name, factors in (("short", short_factor), ("long", long_factor)):
        if len(factors) != size // 2:
            raise ValueError(
                f"The {name}_factor of a longrope scaling needs a number for each of "
                f"{size // 2} pairs of features that RoPE rotates, got {len(factors)}."
            )
    factors = jnp.where(
        length > original, _as_row(long_factor, length), _as_row(short_factor, length)
    )
    if attention_factor is None:
        attention_factor = 1.0
        if factor > 1:
            attention_factor = math.sqrt(1 + math.log(factor) / math.log(original))
    return _as_row(default(theta, size)[0], length) / factors, attention_factor


def _as_row(values: Any, length: jax.Array) -> jax.Array:
    """Numbers, one for each pair, to be combined with lengths ``[*batch, 1]``."""
    row = jnp.asarray(values, length.dtype)
    return jnp.reshape(row, (1,) * (length.ndim - 1) + row.shape)


def _ratio(length: int | None, original: int) -> float:
    assert length is not None, "`checked` requires it or the factor"
    return length / original


_KINDS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (default, linear, dynamic, yarn, llama3, longrope, proportional)
}
_PARAMETERS = {kind: inspect.signature(x).parameters for kind, x in _KINDS.items()}


def frequencies(
    scaling: Mapping[str, Any], theta: float, size: int, length: jax.Array | None
) -> Any:
    """Calls the function of a scaling that `checked` has returned."""
    settings = dict(scaling)
    function = _KINDS[settings.pop("rope_type")]
    lengths = () if length is None else (length,)
    return function(theta, size, *lengths, **settings)


def depends_on_length(scaling: Mapping[str, Any] | None) -> bool:
    """Whether the frequencies depend on the length of the sequence."""
    return scaling is not None and "length" in _PARAMETERS[scaling["rope_type"]]


def checked(scaling: Mapping[str, Any] | None) -> HashableMapping | None:
    """Checks the keys of a scaling; leaves out those that are ``None``.

    Returns:
        The scaling, hashable; ``None`` for one that changes nothing.

    Raises:
        ValueError: If its kind or a key is unknown, or a key is missing.
    """
    kind, settings = _parted(scaling or {})
    parameters = _keywords(kind)
    missing = {k for k, x in parameters.items() if x.default is x.empty}
    missing -= settings.keys()
    either = {"factor", "max_position_embeddings"}
    if either <= parameters.keys() and not either & settings.keys():
        missing.add("factor")
    unknown = settings.keys() - parameters.keys()
    if missing or unknown:
        faults = [f"{k}: missing" for k in sorted(missing)]
        faults += [f"{k}: unknown, {settings[k]!r}" for k in sorted(unknown)]
        raise ValueError(
            errors.message(
                f"RoPE can't read a scaling of the type {kind!r}.",
                where="\n".join(faults),
                way_out=f"Its keys are {', '.join(parameters) or 'none'}.\n"
                "nnx.RoPE.from_config(config) reads rope_theta and everything else it "
                "needs from the content of a config.json.",
            )
        )
    return (
        None if kind == "default" else HashableMapping({"rope_type": kind, **settings})
    )


def _parted(scaling: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The type of a scaling, and its other entries."""
    settings = {k: _hashable(x) for k, x in scaling.items() if x is not None}
    older = settings.pop("type", "default")
    return settings.pop("rope_type", older), settings


def _hashable(x: Any) -> Any:
    return tuple(x) if isinstance(x, list) else x


def _keywords(kind: str) -> dict[str, inspect.Parameter]:
    """The keys that a kind of scaling has."""
    if kind not in _KINDS:
        raise ValueError(
            errors.message(
                f"RoPE has no scaling of the type {kind!r}.",
                way_out=f"Its types are {', '.join(_KINDS)}. For another one, rotate "
                "with your own frequencies.",
            )
        )
    return {k: x for k, x in _PARAMETERS[kind].items() if x.kind is x.KEYWORD_ONLY}


def from_config(
    config: Mapping[str, Any], layer_type: str | None
) -> tuple[float, float, dict[str, Any]]:
    """Reads the content of a config.json, of any version of transformers.

    Returns:
        ``theta``, the share of the features that are rotated, and the scaling, complete
        with what the configuration has elsewhere.

    Raises:
        ValueError: If there is no ``rope_theta``, if the layers differ and
            ``layer_type`` is none of theirs, or if a key is unknown.
    """
    _check_entries(config)
    entries = dict(_of_layer(config, layer_type))
    theta = entries.pop("rope_theta", config.get("rope_theta"))
    if theta is None:
        names = ", ".join(k for k in config if "rope" in k or "rotary" in k)
        raise ValueError(
            errors.message(
                "RoPE.from_config found no rope_theta, whose default differs from "
                "model to model.",
                where=f"config has {names or 'no key with rope or rotary'}",
                way_out="Pass the part of the configuration that has it, such as "
                'config["text_config"], or add it: {"rope_theta": 10000.0, **config}.',
            )
        )
    share = entries.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    share = 1.0 if share is None else share
    kind, settings = _parted(entries)
    settings.pop("partial_rotary_factor", None)
    keys = _keywords(kind)
    if "partial_rotary_factor" in keys:
        settings["partial_rotary_factor"], share = share, 1.0
    longest = config.get("max_position_embeddings")
    if "max_position_embeddings" in keys:
        settings["max_position_embeddings"] = longest
    name = "original_max_position_embeddings"
    if name in keys:
        original = config.get(name) or settings.get(name) or longest
        settings[name] = original
    return theta, share, {"rope_type": kind, **settings}


_READ = (
    *("rope_theta", "rope_scaling", "rope_parameters"),
    *("rope_local_base_freq", "rope_interleave"),
)


def _check_entries(config: Mapping[str, Any]) -> None:
    """Refuses what may change the rotation and is not read."""
    unread = {
        k: x
        for k, x in config.items()
        if k.startswith(("rope_", "rotary")) or k.endswith("rope_theta")
        if k not in _READ and x is not None
    }
    if unread:
        raise ValueError(
            errors.message(
                "RoPE.from_config doesn't read all entries of the configuration.",
                where="\n".join(f"{k}: {x!r}" for k, x in unread.items()),
                way_out="Pass a dict without them, and express their meaning with "
                "rope_theta, partial_rotary_factor or rope_scaling.",
            )
        )


def _of_layer(config: Mapping[str, Any], layer_type: str | None) -> Mapping[str, Any]:
    """The entries for the layers of a type, which may have a dict of their own."""
    entries = config.get("rope_scaling") or config.get("rope_parameters") or {}
    by_type = {k: x for k, x in entries.items() if isinstance(x, Mapping)}
    local_theta = config.get("rope_local_base_freq")
    if local_theta is not None and not by_type:  # Gemma 3, before transformers 5
        local = {"rope_theta": local_theta}
        by_type = {"full_attention": entries, "sliding_attention": local}
    if not by_type:
        return entries
    if layer_type is None or layer_type not in by_type:
        raise ValueError(
            errors.message(
                "RoPE.from_config: the layers of this configuration have different "
                f"rotary embeddings, and there are none for {layer_type!r}.",
                way_out=f"Pass layer_type, one of {', '.join(by_type)}.",
            )
        )
    return by_type[layer_type]
