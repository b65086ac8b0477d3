"""What a case of the peers grid is, and how tables of cases are written.

A case is a layer or a function of the public namespace, how it is made and what it is
called with. It is written down without either library: what belongs to one (an Rngs, a
Module inside a Module) stands there as a `PerLibrary`, an array as a `Spec`.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Spec(NamedTuple):
    """An array to be drawn, the same for both libraries."""

    shape: tuple[int, ...]
    dtype: str


def real(*shape: int, dtype: str = "float32") -> Spec:
    return Spec(shape, dtype)


def integers(*shape: int, dtype: str = "int32") -> Spec:
    return Spec(shape, dtype)


def booleans(*shape: int) -> Spec:
    return Spec(shape, "bool")


class PerLibrary(NamedTuple):
    """A value that each library makes for itself.

    Attributes:
        make: Called with the library and the Rngs of the constructor or of the call.
    """

    make: Callable[[Any, Any], Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of the grid.

    Attributes:
        name: A class or function of the namespace: ``"nn.linear.Linear"``.
        args: Positional arguments of the constructor.
        options: Keyword arguments of the constructor.
        inputs: Positional arguments of the call; other numbers in each call.
        call: Keyword arguments of the call.
        method: What is called: the name of a method, or a function that takes the
            layer and the arguments of the call.
        prepare: Called with the layer before the first call.
        calls: How often to call.
        streams: The names of the streams in the Rngs; none: a default one.
        why_different: Where the peer is wrong, so that results must differ; empty: they
            must agree.
    """

    name: str
    args: tuple = ()
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    inputs: tuple = ()
    call: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    method: str | Callable = "__call__"
    prepare: Callable[[Any], Any] | None = None
    calls: int = 1
    streams: tuple[str, ...] = ()
    why_different: str = ""

    def but(self, *args: Any, **changes: Any) -> "Case":
        """This case with other fields; options and call are added to those it has."""
        changes["args"] = args or self.args
        for field in ("options", "call"):
            changes[field] = {**getattr(self, field), **changes.get(field, {})}
        return dataclasses.replace(self, **changes)

    def of(self, *inputs: Any, **call: Any) -> "Case":
        """This case called otherwise."""
        return self.but(inputs=inputs or self.inputs, call=call)

    def cast(self, dtype: str) -> "Case":
        """This case called with arrays of another dtype."""
        return self.of(*(spec._replace(dtype=dtype) for spec in self.inputs))


def with_options(base: Case, *rows: Mapping[str, Any]) -> Iterator[Case]:
    return (base.but(options=row) for row in rows)


def with_call(base: Case, *rows: Mapping[str, Any]) -> Iterator[Case]:
    return (base.but(call=row) for row in rows)


def over_dtypes(base: Case) -> Iterator[Case]:
    """Half precision of the computation, and of Params and inputs."""
    yield base.but(options={"dtype": jnp.bfloat16})
    yield base.cast("bfloat16").but(options={"param_dtype": jnp.bfloat16})


# ------------------------------------------------------------------- values from a case


def resolve(value: Any, library: Any, rngs: Any, seed: int) -> Any:
    """Puts arrays for each `Spec` and a library's own values for each `PerLibrary`."""
    if isinstance(value, Spec):
        return draw(value, seed)
    if isinstance(value, PerLibrary):
        return value.make(library, rngs)
    if type(value) in (tuple, list):
        parts = enumerate(value)
        return type(value)(resolve(x, library, rngs, seed + n) for n, x in parts)
    return value


@functools.cache
def draw(spec: Spec, seed: int) -> jax.Array:
    """Draws an array: normal numbers, integers below five, mostly true booleans."""
    generator = np.random.default_rng(seed)
    if spec.dtype == "bool":
        return jnp.asarray(generator.random(spec.shape) < 0.7)
    if jnp.issubdtype(spec.dtype, jnp.integer):
        return jnp.asarray(generator.integers(0, 5, spec.shape), spec.dtype)
    return jnp.asarray(generator.standard_normal(spec.shape), spec.dtype)


def from_key(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """An initializer: normal numbers that depend on the key; it compiles nothing."""
    generator = np.random.default_rng(np.asarray(jax.random.key_data(key)))
    return jnp.asarray(generator.standard_normal(shape), dtype)
