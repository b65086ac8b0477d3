"""A mixture of experts beside raw JAX: by ragged_dot, and by all experts.

Raw JAX has two ways: tokens sorted to experts and ``jax.lax.ragged_dot``, as one writes
it by hand, and all experts for all tokens.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

import graftree
from benchmarks import groups
from benchmarks.gauges import Operation
from benchmarks.groups import Group, Row
from benchmarks.libraries import GRAFTREE, RAW

MEGABYTES = groups.Quantity("MB", 1e-6, groups.gauges.reading)


@dataclasses.dataclass(frozen=True)
class Setting:
    """A mixture of gated MLPs, and a batch.

    Attributes:
        num_experts: The number of experts.
        top_k: How many of them a token goes to.
        tokens: The number of tokens.
        features: The size of a token.
        hidden: The size inside of an expert.
    """

    num_experts: int
    top_k: int = 2
    tokens: int = 1024
    features: int = 128
    hidden: int = 256

    def model(self) -> Any:
        """The mixture, from one seed."""
        rngs = graftree.Rngs(0)
        sizes = self.features, self.hidden
        router = graftree.Router(
            self.features, self.num_experts, top_k=self.top_k, rngs=rngs
        )
        experts = graftree.GatedExperts(self.num_experts, *sizes, rngs=rngs)
        return graftree.MixtureOfExperts(router, experts)

    def params(self) -> list[jax.Array]:
        """Kernels of the router, and of gate, up and down."""
        model = self.model()
        parts = [model.experts.gate, model.experts.up, model.experts.down]
        return [part.kernel[...] for part in (model.router, *parts)]

    def inputs(self) -> jax.Array:
        """The tokens."""
        return jax.random.normal(jax.random.key(1), (self.tokens, self.features))


def all_groups() -> list[Group]:
    """All measurements: the cost as the number of experts grows."""
    settings = map(Setting, (4, 16, 64))
    return [group for setting in settings for group in of_setting(setting)]


def of_setting(setting: Setting) -> list[Group]:
    """Time and memory of the outputs, and of the gradient."""
    ways = {
        (RAW, "ragged_dot"): functools.partial(raw, by_ragged_dot, setting),
        (RAW, "all experts"): functools.partial(raw, by_all_experts, setting),
        (GRAFTREE, ""): functools.partial(ours, setting),
    }
    sizes = f"{setting.top_k} of {setting.num_experts} experts"
    name = f"{sizes}, {setting.tokens} tokens"
    made = []
    for what in ("forward", "gradient"):
        for quantity, measured in (
            (groups.MILLISECONDS, "time"),
            (MEGABYTES, "memory"),
        ):
            rows = [
                Row(*names, functools.partial(way, what, measured))
                for names, way in ways.items()
            ]
            title = f"{name}, {what}: {measured}"
            made.append(Group(title, quantity, tuple(rows)))
    return made


def raw(function: Any, setting: Setting, what: str, measured: str) -> Operation:
    """The operation of a function of arrays."""
    call = functools.partial(function, setting.top_k)
    if what == "gradient":
        call = jax.grad(
            lambda params, x: jnp.sum(function(setting.top_k, params, x) ** 2)
        )
    return _operation(jax.jit(call), setting.params(), setting.inputs(), measured)


def ours(setting: Setting, what: str, measured: str) -> Operation:
    """The operation of the layer."""

    def call(model: Any, x: Any) -> Any:
        return model(x)

    if what == "gradient":
        call = graftree.grad(lambda model, x: jnp.sum(model(x) ** 2))
    program = graftree.jit(call)
    return _operation(program, setting.model(), setting.inputs(), measured)


def _operation(program: Any, model: Any, x: jax.Array, measured: str) -> Operation:
    if measured == "time":
        return lambda: program(model, x)
    compiled = program.lower(model, x).compile()
    return lambda: float(compiled.memory_analysis().temp_size_in_bytes)


def by_ragged_dot(top_k: int, params: Any, x: jax.Array) -> jax.Array:
    """Sorts tokens to experts by hand."""
    router, gate, up, down = params
    experts, weights = _routed(top_k, router, x)
    order = jnp.argsort(experts.reshape(-1), stable=True)
    sizes = jnp.bincount(experts.reshape(-1), length=len(gate)).astype(jnp.int32)
    rows = x[order // top_k]
    dot = jax.lax.ragged_dot
    hidden = jax.nn.silu(dot(rows, gate, sizes)) * dot(rows, up, sizes)
    outputs = dot(hidden, down, sizes)[jnp.argsort(order)]
    return jnp.einsum("nkf,nk->nf", outputs.reshape(*experts.shape, -1), weights)


def by_all_experts(top_k: int, params: Any, x: jax.Array) -> jax.Array:
    """Computes all experts for all tokens."""
    router, gate, up, down = params
    experts, weights = _routed(top_k, router, x)
    hidden = jax.nn.silu(jnp.einsum("nf,efh->neh", x, gate))
    hidden *= jnp.einsum("nf,efh->neh", x, up)
    each = jax.nn.one_hot(experts, len(gate)) * weights[..., None]
    return jnp.einsum("neh,ehf,ne->nf", hidden, down, each.sum(axis=1))


def _routed(top_k: int, router: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    logits, experts = jax.lax.top_k(x @ router, top_k)
    return experts, jax.nn.softmax(logits)
