"""Every kind of weight that can have LoRA, with its formula.

Each layer is linear in its weight, so its outputs and the gradients of both factors are
known in NumPy's float64, from the letters of the axes.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

import graftree as nnx

SCALE = 3.0
CALL = nnx.jit(lambda layer, x: layer(x))


class Own(nnx.Module):
    """A module that computes with its matrix, read in one of several ways."""

    def __init__(self, shape, how):
        self.w = nnx.Param(jnp.asarray(numbers(*shape)))
        self.how = how

    def __call__(self, x):
        return READS[self.how](self, x)


READS = {
    "operator": lambda self, x: x @ self.w,
    "attribute": lambda self, x: x @ self.w.T,
    "function": lambda self, x: jnp.dot(x, self.w),
    "part": lambda self, x: jnp.einsum("bi,eio->ebo", x, self.w[:]),
    "array": lambda self, x: jnp.einsum("bi,eoi->ebo", x, jnp.asarray(self.w)),
}


class Grouped(nnx.Module):
    """Rows of three groups, one of which has none."""

    def __init__(self, rngs):
        self.part = nnx.GroupedLinear(3, 4, 2, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.part(x, jnp.array([2, 0, 3]))


class Doubled(nnx.Linear):
    def __call__(self, x):
        return 2 * super().__call__(x)


def numbers(*shape):
    seed = sum((i + 2) * size for i, size in enumerate(shape))
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def grouped(x, w):
    """A convolution with kernel size 1, in two groups."""
    halves = [x[..., :2] @ w[0][:, :3], x[..., 2:] @ w[0][:, 3:]]
    return np.concatenate(halves, -1)


def windows(x, w):
    """A convolution with kernel size 2."""
    return x[:, :-1] @ w[0] + x[:, 1:] @ w[1]


def in_groups(x, w):
    """The rows of three groups, as `Grouped` has them."""
    return np.concatenate([x[:2] @ w[0], x[2:] @ w[2]])


class Kind(NamedTuple):
    """A layer, what is selected, its inputs, outputs, and the product of the factors.

    The last one is its line in a table of weights; ``None``: PEFT has no such factors.
    """

    make: object
    where: str
    x: object
    expected: object
    product: str
    line: object = None


def einsum(equation):
    return lambda x, w: np.einsum(equation, x, w)


HEADS = "btd,ndh->btnh"
KINDS = {
    "Linear": Kind(
        lambda rngs: nnx.Linear(4, 3, use_bias=False, rngs=rngs),
        *("layer", numbers(2, 4), einsum("bi,io->bo"), "ir,ro->io"),
        {"x.weight": "layer.kernel"},
    ),
    "LinearGeneral": Kind(
        lambda rngs: nnx.LinearGeneral(4, (2, 3), use_bias=False, rngs=rngs),
        *("layer", numbers(2, 4), einsum("bi,inh->bnh"), "ir,rnh->inh"),
        {"x.weight": "layer.kernel"},
    ),
    "LinearGeneral with a batch": Kind(
        lambda rngs: nnx.LinearGeneral(
            4, 3, batch_axis={0: 2}, use_bias=False, rngs=rngs
        ),
        *("layer", numbers(2, 5, 4), einsum("nbi,nio->nbo"), "nir,nro->nio"),
    ),
    "Einsum by its kernel": Kind(
        lambda rngs: nnx.Einsum("...d,df->...f", (4, 3), rngs=rngs),
        *("layer.kernel", numbers(2, 5, 4), einsum("btd,df->btf"), "dr,rf->df"),
        {"x.weight": ("layer.kernel", "f d -> d f")},
    ),
    "Einsum with heads first": Kind(
        lambda rngs: nnx.Einsum(HEADS, (2, 4, 3), rngs=rngs),
        *("layer", numbers(2, 5, 4), einsum(HEADS), "dr,rnh->ndh"),
        {"x.weight": ("layer.kernel", "(n h) d -> n d h")},
    ),
    "Einsum to one axis": Kind(
        lambda rngs: nnx.Einsum("btnh,nhd->btd", (2, 3, 4), rngs=rngs),
        *("layer", numbers(2, 5, 2, 3), einsum("btnh,nhd->btd"), "nhr,rd->nhd"),
        {"x.weight": ("layer.kernel", "d (n h) -> n h d")},
    ),
    "Einsum of experts": Kind(
        lambda rngs: nnx.Einsum("ebd,def->ebf", (4, 2, 3), rngs=rngs),
        *("layer", numbers(2, 5, 4), einsum("ebd,def->ebf"), "edr,erf->def"),
    ),
    "Einsum without an equation": Kind(
        lambda rngs: Equation(None, (4, 3), rngs=rngs),
        *("layer.kernel", numbers(2, 4), einsum("bi,io->bo"), "ir,ro->io"),
        {"x.w": ("layer.kernel", "o i -> i o")},
    ),
    "Conv": Kind(
        lambda rngs: nnx.Conv(4, 3, (2,), padding="VALID", use_bias=False, rngs=rngs),
        *("layer", numbers(2, 5, 4), windows, "kir,ro->kio"),
        {"x.weight": "layer.kernel"},
    ),
    "Conv in groups": Kind(
        lambda rngs: nnx.Conv(
            4, 6, 1, feature_group_count=2, use_bias=False, rngs=rngs
        ),
        *("layer.kernel", numbers(2, 5, 4), grouped, "kir,kro->kio"),
    ),
    "Embed": Kind(
        lambda rngs: nnx.Embed(5, 3, rngs=rngs),
        *("layer", np.array([1, 4, 1]), lambda x, w: w[x], "ir,ro->io"),
        {"x.weight": "layer.embedding"},
    ),
    "GroupedLinear": Kind(
        Grouped,
        *("layer.part", numbers(5, 4), in_groups, "eir,ero->eio"),
        {"x.w": ("layer.part.kernel", "e i o -> e i o")},
    ),
    "a subclass": Kind(
        lambda rngs: Doubled(4, 3, use_bias=False, rngs=rngs),
        *("layer.kernel", numbers(2, 4), lambda x, w: 2 * x @ w, "ir,ro->io"),
        {"x.weight": "layer.kernel"},
    ),
    "own, by an operator": Kind(
        lambda rngs: Own((4, 3), "operator"),
        *("layer.w", numbers(2, 4), einsum("bi,io->bo"), "ir,ro->io"),
        {"x.w": ("layer.w", "o i -> i o")},
    ),
    "own, by an attribute": Kind(
        lambda rngs: Own((3, 4), "attribute"),
        *("layer.w", numbers(2, 4), einsum("bi,oi->bo"), "or,ri->oi"),
        {"x.w": "layer.w"},
    ),
    "own, by a function": Kind(
        lambda rngs: Own((4, 3), "function"),
        *("**.w", numbers(2, 4), einsum("bi,io->bo"), "ir,ro->io"),
        {"x.weight": ("layer.w", "o i -> i o")},
    ),
    "own, experts": Kind(
        lambda rngs: Own((2, 4, 3), "part"),
        *("layer.w", numbers(2, 4), einsum("bi,eio->ebo"), "eir,ero->eio"),
        {"x.w": ("layer.w", "e o i -> e i o")},
    ),
    "own, experts the other way": Kind(
        lambda rngs: Own((2, 3, 4), "array"),
        *("layer.w", numbers(2, 4), einsum("bi,eoi->ebo"), "eor,eri->eoi"),
        {"x.w": ("layer.w", "e o i -> e o i")},
    ),
}


class Equation(nnx.Einsum):
    def __call__(self, x):
        return super().__call__(x, "bi,io->bo")


def float64(*leaves):
    return [np.float64(leaf[...]) for leaf in leaves]


def check(found, expected, tolerance):
    np.testing.assert_allclose(
        np.float64(found), expected, atol=tolerance * np.abs(expected).max()
    )
