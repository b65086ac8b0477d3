"""The models that tests share.

Each is deterministic, small, and works on arrays whose last axis has two elements. A
test that needs attributes and no method takes `Box`; one that needs a single peculiar
method has a class of its own.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import graftree as nnx


class Box(nnx.Module):
    """A Module with the attributes that it is given."""

    def __init__(self, **attributes: Any) -> None:
        for name, value in attributes.items():
            setattr(self, name, value)


class Node(nnx.Pytree):
    """The same, and no Module."""

    def __init__(self, **attributes: Any) -> None:
        for name, value in attributes.items():
            setattr(self, name, value)


class Hidden(Box, pytree=False):
    """The same, and no pytree of JAX."""


class Kind(nnx.Param):
    """A kind of Variable of which the library knows nothing."""


class Scale(nnx.Module):
    """Multiplies by the Param ``w``."""

    def __init__(self, factor: Any = 2.0) -> None:
        self.w = nnx.Param(jnp.asarray(factor))

    def __call__(self, x: Any) -> jax.Array:
        return self.w * x


class Counter(nnx.Module):
    """Counts its calls in the Variable ``count``."""

    def __init__(self) -> None:
        self.count = nnx.Variable(jnp.array(0))

    def __call__(self, x: Any = 0) -> Any:
        self.count[...] += 1
        return x


class Parts(nnx.Module):
    """Variables with and without metadata, an array, a static value, submodules."""

    def __init__(self) -> None:
        self.a = nnx.Param(jnp.array([1.0, 2.0]), tag="x")
        self.b = nnx.BatchStat(jnp.array([3.0, 4.0]))
        self.array = jnp.array([5.0, 6.0])
        self.k = 1
        self.left = nnx.Dict(w=nnx.Param(jnp.array([7.0, 8.0])))
        self.right = nnx.Dict(w=nnx.Param(jnp.array([9.0, 10.0])))


class Tied(nnx.Module):
    """One Variable under two names, a child in two places, and a way back up."""

    def __init__(self) -> None:
        self.a = nnx.Param(jnp.array([1.0, 2.0]))
        self.same = self.a
        self.children = nnx.List([Scale(3.0)])
        self.child = self.children[0]
        self.child.parent = self


class Block(nnx.Module):
    """A `Linear`, a `BatchNorm` and a `Dropout`."""

    def __init__(self, features: int = 2, rngs: nnx.Rngs | None = None) -> None:
        rngs = nnx.Rngs(0) if rngs is None else rngs
        self.linear = nnx.Linear(features, features, rngs=rngs)
        self.norm = nnx.BatchNorm(features, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dropout(self.norm(self.linear(x)))


class Noise(nnx.Module):
    """Adds noise from the stream ``noise``."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.rngs = rngs

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.rngs.noise.normal(x.shape)
