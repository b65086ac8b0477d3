"""What a case of the peers grid is, and how tables of cases are written.

A case is a layer or a function of the public namespace, how it is made and what it is
called with. It is written down without either library: what belongs to one (an Rngs, a
Module inside a Module) stands there as a `PerLibrary`, an array as a `Spec`.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

DTYPES = (None, jnp.float32, jnp.bfloat16, jnp.float16)
PARAM_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
INPUT_DTYPES = ("float32", "bfloat16", "float16", "int32")


class Spec(NamedTuple):
    """An array to be drawn, the same for both libraries."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    below: int = 5  # of integers


def real(*shape: int, dtype: str = "float32") -> Spec:
    return Spec(shape, dtype)


def integers(*shape: int, below: int = 5, dtype: str = "int32") -> Spec:
    return Spec(shape, dtype, below)


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
            library, the layer and the arguments of the call.
        prepare: Called with the layer before the first call.
        calls: How often to call.
        streams: The names of the streams in the Rngs; none: a default one.
        why_different: Where the peer is wrong, so that results must differ; empty: they
            must agree.
        since: The version of Flax from which on this holds; empty: all that we support.
    """

    name: str
    args: tuple = ()
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    inputs: tuple = ()
    call: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    method: str | Callable = "__call__"
    prepare: Callable[[Any], Any] | None = None
    calls: int = 2
    streams: tuple[str, ...] = ()
    why_different: str = ""
    since: str = ""

    def __str__(self) -> str:
        shown = [_show(arg) for arg in self.args]
        shown += [f"{key}={_show(value)}" for key, value in self.options.items()]
        call = [_show(value) for value in self.inputs]
        call += [f"{key}={_show(value)}" for key, value in self.call.items()]
        return f"{self.name}({', '.join(shown)}) called with ({', '.join(call)})"

    def but(self, **changes: Any) -> "Case":
        """This case with other fields; options and call are added to those it has."""
        for field in ("options", "call"):
            changes[field] = {**getattr(self, field), **changes.get(field, {})}
        return dataclasses.replace(self, **changes)


def _show(value: Any) -> str:
    if isinstance(value, Spec):
        return f"{value.dtype}{list(value.shape)}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_show, value))})"
    if isinstance(value, PerLibrary):
        return _show(value.make)
    return getattr(value, "__name__", repr(value))


# ------------------------------------------------------------------- many cases at once


def grid(**axes: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """All combinations of the values of some arguments."""
    for values in itertools.product(*axes.values()):
        yield dict(zip(axes, values, strict=True))


def each(**axes: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """The values of some arguments, one argument at a time."""
    for key, values in axes.items():
        for value in values:
            yield {key: value}


def with_options(base: Case, rows: Iterable[Mapping[str, Any]]) -> Iterator[Case]:
    return (base.but(options=row) for row in rows)


def with_call(base: Case, rows: Iterable[Mapping[str, Any]]) -> Iterator[Case]:
    return (base.but(call=row) for row in rows)


def with_inputs(base: Case, *rows: Any) -> Iterator[Case]:
    return (base.but(inputs=row if type(row) is tuple else (row,)) for row in rows)


def over_dtypes(
    base: Case, inputs: Iterable[str] = INPUT_DTYPES, **axes: Iterable[Any]
) -> Iterator[Case]:
    """All combinations of the dtypes of computation, Params and inputs."""
    for options in grid(dtype=DTYPES, param_dtype=PARAM_DTYPES, **axes):
        for dtype in inputs:
            changed = jax.tree.map(
                lambda spec, dtype=dtype: spec._replace(dtype=dtype),
                base.inputs,
                is_leaf=lambda x: isinstance(x, Spec),
            )
            yield base.but(options=options, inputs=changed)


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
    """Draws an array: normal numbers, integers from zero on, mostly true booleans."""
    generator = np.random.default_rng(seed)
    if spec.dtype == "bool":
        return jnp.asarray(generator.random(spec.shape) < 0.7)
    if jnp.issubdtype(spec.dtype, jnp.integer):
        return jnp.asarray(generator.integers(0, spec.below, spec.shape), spec.dtype)
    return jnp.asarray(generator.standard_normal(spec.shape), spec.dtype)


def from_key(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """An initializer: normal numbers that depend on the key; it compiles nothing."""
    generator = np.random.default_rng(np.asarray(jax.random.key_data(key)))
    return jnp.asarray(generator.standard_normal(shape), dtype)
