"""The config of an adapter of PEFT: what we need of it, and what PEFT does."""

from __future__ import annotations

import json
import math
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from graftree import errors


class Adaptation(NamedTuple):
    """What an adapter has for a layer: its rank, and the scale times the rank."""

    rank: int
    alpha: float


# What a config may say of LoRA as it is here; other keys must be off.
_KNOWN = frozenset(
    "alpha_pattern auto_mapping base_model_name_or_path corda_config "
    "ensure_weight_tying eva_config exclude_modules fan_in_fan_out inference_mode "
    "init_lora_weights layers_pattern layers_to_transform loftq_config lora_alpha "
    "lora_dropout lora_ga_config megatron_config megatron_core peft_type peft_version "
    "qalora_group_size r rank_pattern revision runtime_config target_modules task_type "
    "use_rslora velora_config".split()
)
_OFF = (None, False, "none", [], {})
# Ways to begin that leave the weights of the model as they were.
_HARMLESS_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")


def read(path: pathlib.Path) -> dict[str, Any]:
    """Reads a config.

    Raises:
        ValueError: If the adapter has more than LoRA factors.
        WeightsError: If the file is damaged.
    """
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise errors.WeightsError(f"nnx.weights can't read {path}: {error}") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise ValueError(f"{path} is not of a LoRA adapter: no peft_type 'LORA'.")
    wrong = [
        f"{key}: {value!r}"
        for key, value in config.items()
        if key not in _KNOWN and value not in _OFF
    ]
    start = config.get("init_lora_weights")
    if start not in _HARMLESS_STARTS:
        wrong.append(f"init_lora_weights: {start!r}, which changes the model's weights")
    if wrong:
        raise ValueError(
            errors.message(
                f"{path}: the adapter has more than LoRA factors.",
                where="\n".join(wrong),
                way_out="Merge it in PEFT, and load the merged weights.",
            )
        )
    return config


def adaptation_of(config: Mapping[str, Any], name: str) -> Adaptation:
    """What a config says of a module."""
    rank = int(_of_module(name, config.get("rank_pattern"), config.get("r", 8)))
    alpha = float(_of_module(name, config.get("alpha_pattern"), config["lora_alpha"]))
    if config.get("use_rslora"):
        alpha *= math.sqrt(rank)
    return Adaptation(rank, alpha)


def _of_module(name: str, by_pattern: Mapping[str, Any] | None, usual: Any) -> Any:
    """The value for a module, if a pattern has one for it, as PEFT reads them."""
    for pattern, value in (by_pattern or {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", name):
            return value
    return usual


def write(
    adaptations: Mapping[str, Adaptation],
    known: Sequence[str],
    base_model: str | None,
    task_type: str | None,
) -> dict[str, Any]:
    """What PEFT wants to know.

    Args:
        adaptations: The modules that are adapted.
        known: All modules that could be.
        base_model: Where PEFT finds the model.
        task_type: What PEFT wraps it for.
    """
    kinds = [*adaptations.values()]
    usual = max({*kinds}, key=kinds.count)
    ranks = {name: x.rank for name, x in adaptations.items() if x.rank != usual.rank}
    alphas = {
        name: _number(x.alpha)
        for name, x in adaptations.items()
        if x.alpha != usual.alpha
    }
    return {
        "peft_type": "LORA",
        "task_type": task_type,
        "base_model_name_or_path": base_model,
        "r": usual.rank,
        "lora_alpha": _number(usual.alpha),
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
        "target_modules": _targets([*adaptations], known),
        "bias": "none",
        "lora_dropout": 0.0,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "use_dora": False,
        "use_rslora": False,
    }


def _number(x: float) -> float:
    return int(x) if x == int(x) else x


def _targets(adapted: Sequence[str], known: Sequence[str]) -> list[str]:
    """The last parts of the names, if they mean these layers and no others."""
    last = {name.rpartition(".")[2] for name in adapted}
    meant = {name for name in known if name.rpartition(".")[2] in last}
    are_words = not any(map(str.isdigit, last))
    return sorted(last if are_words and meant == {*adapted} else adapted)
