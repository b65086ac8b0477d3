"""Policies: the dtypes of the parameters, the arithmetic and the results."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from graftree import errors
from graftree.annotations import Dtype

_KINDS = ("params", "compute", "output")
_SHORT = {"f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64"}
_DTYPES = {name: getattr(jnp, name) for name in _SHORT.values()}
_WAY_OUT = (
    "Write, for example, 'params=f32, compute=bf16, output=f32'; the dtypes are "
    "f16, bf16, f32 and f64, or float16, bfloat16, float32 and float64."
)


@dataclasses.dataclass(frozen=True)
class Policy:
    """Dtypes of a model, or of a part of it.

    Functions that take a policy also take its text: ``"params=f32, compute=bf16"``.

    Args:
        params: The dtype in which parameters are stored; ``None``: unchanged.
        compute: The dtype in which layers compute, and which they return; ``None``:
            unchanged.
        output: The dtype to which the result of a call is cast; ``None``: it is not
            cast.

    Raises:
        ValueError: If a part is not a floating dtype, or is float64 while JAX has it
            switched off.

    Example:
        >>> policy = nnx.precision.Policy(params="f32", compute=jnp.bfloat16)
        >>> print(policy)
        params=float32, compute=bfloat16
        >>> policy == nnx.precision.Policy.parse("params=f32, compute=bf16")
        True
    """

    params: Any = None
    compute: Any = None
    output: Any = None

    def __post_init__(self) -> None:
        for kind, dtype in _set_dtypes(self).items():
            object.__setattr__(self, kind, _floating(kind, dtype))

    @classmethod
    def parse(cls, text: str) -> Policy:
        """Reads a policy from its text.

        Args:
            text: Parts separated by commas, each ``params=``, ``compute=`` or
                ``output=`` with a dtype.

        Returns:
            The policy; parts that are not in the text are ``None``.

        Raises:
            TypeError: If ``text`` is not a string.
            ValueError: If it names no part, an unknown part or dtype, or a part twice.

        Example:
            >>> nnx.precision.Policy.parse("compute=f16").compute
            dtype('float16')
        """
        if not isinstance(text, str):
            raise TypeError(
                f"A policy must be a string or an nnx.precision.Policy, got "
                f"{type(text).__name__}.\n{_WAY_OUT}"
            )
        words: dict[str, str] = {}
        for piece in text.split(","):
            name, sign, word = (x.strip() for x in piece.partition("="))
            if not sign or not name or not word:
                raise _malformed(text, f"{piece.strip()!r} is not of the form part=f32")
            if name not in _KINDS:
                raise _malformed(text, f"there is no part {name!r}{_near(name)}")
            if name in words:
                raise _malformed(text, f"{name} is given twice")
            words[name] = word
        return cls(**words)

    def __str__(self) -> str:
        return ", ".join([f"{kind}={x}" for kind, x in _set_dtypes(self).items()])

    def __repr__(self) -> str:
        return f"Policy({str(self)!r})"


def _set_dtypes(policy: Policy) -> dict[str, Any]:
    """Returns the dtypes that a policy sets."""
    return {kind: x for kind, x in vars(policy).items() if x is not None}


def of(policy: str | Policy) -> Policy:
    """Returns a policy, or reads it from its text."""
    return policy if isinstance(policy, Policy) else Policy.parse(policy)


def of_model(spelled: str | Policy) -> Policy:
    """Returns a policy for a model; it must say how parameters are stored and used."""
    policy = of(spelled)
    missing = [
        kind for kind in ("params", "compute") if kind not in _set_dtypes(policy)
    ]
    if missing:
        raise ValueError(
            f"The policy of a model needs params and compute, but {str(spelled)!r} "
            f"lacks {' and '.join(missing)}.\n{_WAY_OUT}"
        )
    return policy


def overridden(policy: Policy, by: Policy) -> Policy:
    """Replaces dtypes of a policy by those that another one sets."""
    return dataclasses.replace(policy, **_set_dtypes(by))


# Leaves everything as it is.
KEEP = Policy()
_KEEP_WORD = "keep"

Exceptions = Mapping[Any, "str | Policy"]


def of_exceptions(exceptions: Exceptions | None) -> list[tuple[Any, Policy]]:
    """Returns exceptions as selections with policies; `KEEP` for ``"keep"``."""
    if exceptions is not None and not isinstance(exceptions, Mapping):
        raise TypeError(
            "The exceptions of a policy must be a dict, such as "
            f"{{'head': 'compute=f32'}}, got {type(exceptions).__name__}."
        )
    return [
        (selection, KEEP if policy == _KEEP_WORD else of(policy))
        for selection, policy in (exceptions or {}).items()
    ]


def scalar_type(dtype: np.dtype[Any]) -> Dtype:
    """Returns a dtype as users write it in arguments of layers, like `jnp.bfloat16`."""
    return _DTYPES[dtype.name]


def _floating(kind: str, dtype: Any) -> np.dtype[Any]:
    name = _SHORT.get(dtype, dtype) if isinstance(dtype, str) else _name_of(dtype)
    if name not in _DTYPES:
        raise ValueError(
            f"{kind}={dtype!r} is not a floating dtype of a policy"
            f"{_near(str(dtype))}.\n{_WAY_OUT}"
        )
    if name == "float64" and not jax.config.read("jax_enable_x64"):
        raise ValueError(
            f"{kind}=float64, but JAX has 64-bit types switched off: arrays would be "
            'float32.\nCall jax.config.update("jax_enable_x64", True) first.'
        )
    return jnp.dtype(_DTYPES[name])


def _name_of(dtype: Any) -> str:
    try:
        return jnp.dtype(dtype).name
    except TypeError:
        return ""


def _near(word: str) -> str:
    choices = [*_KINDS, *_SHORT, *_DTYPES]
    matches = difflib.get_close_matches(word, choices, n=1, cutoff=0.6)
    return f" (did you mean {matches[0]!r}?)" if matches else ""


def _malformed(text: str, reason: str) -> ValueError:
    return ValueError(
        errors.message(f"The policy {text!r} is malformed: {reason}.", way_out=_WAY_OUT)
    )
