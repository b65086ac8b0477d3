"""Counts what a reader has to follow: Python calls, functions and files of one call.

``python -m benchmarks.reading`` prints a line for each of a few common calls: how many
calls of functions of the library it makes, how many functions these are, and in how
many files they stand. JAX's own functions and the user's don't count.

Then it prints the same of the first eager call of five layers, here, in Flax NNX and in
Equinox: the lines of code of the class, with those of the classes that it derives from
below ``Module``, and of all functions that the call goes through. Lines of code have no
blank lines, comments or docstrings.
"""

import functools
import inspect
import pathlib
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import graftree as nnx
from benchmarks import libraries, tables
from benchmarks.libraries import EQUINOX, FLAX, GRAFTREE
from tests import sources


class MLP(nnx.Module):
    """Two layers."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(4, 8, rngs=rngs)
        self.second = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits."""
        return self.second(nnx.relu(self.first(x)))


def followed(call: Callable[[], Any], library: Any = nnx) -> list[types.CodeType]:
    """The functions of a library that a call goes through, each time that they run."""
    package = str(pathlib.Path(library.__file__).parent)
    calls: list[types.CodeType] = []

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(package):
            calls.append(frame.f_code)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return calls


def files_of(codes: Iterable[types.CodeType]) -> int:
    """In how many files functions stand."""
    return len({code.co_filename for code in codes})


# ------------------------------------------------------------------------- five layers

NAMES = ("Linear", "Dropout", "BatchNorm", "MultiHeadAttention", "LSTMCell")
X = jnp.ones((2, 3, 8))


def layers_of(library: Any) -> dict[str, tuple[type, Callable[[], Any]]]:
    """The classes of Graftree or Flax NNX, and a call of each."""
    rngs, (x, h) = library.Rngs(0), X[:, 0, None].swapaxes(0, 1).repeat(2, 0)
    layers = (
        library.Linear(8, 8, rngs=rngs),
        library.Dropout(0.5, rngs=rngs),
        library.BatchNorm(8, rngs=rngs),
        library.MultiHeadAttention(2, 8, decode=False, rngs=rngs),
        library.LSTMCell(8, 8, rngs=rngs),
    )
    linear, dropout, norm, attention, cell = layers
    calls = (
        lambda: linear(x),
        lambda: dropout(x),
        lambda: norm(x),
        lambda: attention(X),
        lambda: cell((h, h), x),
    )
    classes = map(type, layers)
    return dict(zip(NAMES, zip(classes, calls, strict=True), strict=True))


def layers_of_equinox(eqx: Any) -> dict[str, tuple[type, Callable[[], Any]]]:
    """The same of Equinox, whose layers take a single example."""
    key, x = jax.random.key(0), X[0, 0]
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(8, "batch", mode="batch")
    axes = {"in_axes": (0, None), "out_axes": (0, None), "axis_name": "batch"}
    layers = (
        eqx.nn.Linear(8, 8, key=key),
        eqx.nn.Dropout(0.5),
        norm,
        eqx.nn.MultiheadAttention(2, 8, key=key),
        eqx.nn.LSTMCell(8, 8, key=key),
    )
    linear, dropout, norm, attention, cell = layers
    calls = (
        lambda: linear(x),
        lambda: dropout(x, key=key),
        lambda: jax.vmap(norm, **axes)(X[0], state),
        lambda: attention(X[0], X[0], X[0]),
        lambda: cell(x, (x, x)),
    )
    classes = map(type, layers)
    return dict(zip(NAMES, zip(classes, calls, strict=True), strict=True))


@functools.cache
def _source(file: str) -> sources.Source:
    path = pathlib.Path(file)
    return sources.Source(path, path.read_text())


def lines_of(objects: Iterable[Any]) -> int:
    """How many lines of code the classes or functions have, each line once."""
    found = set()
    for x in objects:
        file = inspect.getfile(x)
        lines, first = inspect.getsourcelines(x)
        spanned = {*range(first, first + len(lines))} & _source(file).code_lines
        found |= {(file, number) for number in spanned}
    return len(found)


def print_layers() -> None:
    """Prints the table of the five layers."""
    figures = ["lines of the class", "functions of a call", "files", "lines of these"]
    print("", tables.head(["layer", "library"], figures), sep="\n")
    found = libraries.installed(GRAFTREE, FLAX, EQUINOX)
    made = {
        name: layers_of_equinox(x) if name == EQUINOX else layers_of(x)
        for name, x in found.items()
    }
    for layer in NAMES:
        for name, layers in made.items():
            cls, call = layers[layer]
            bases = _below_module(cls, found[name])
            codes = {*followed(call, found[name])}
            counts = lines_of(bases), len(codes), files_of(codes), lines_of(codes)
            print(tables.line([layer, name, *map(str, counts)]))


def _below_module(cls: type, library: Any) -> list[type]:
    """The class, and those that it derives from, but for Module and what is above."""
    module = library.Module
    return [base for base in cls.__mro__ if issubclass(base, module) and base != module]


def main() -> None:
    """Prints the tables."""
    x, y = jnp.ones((3, 4)), jnp.ones((3, 2))

    def loss(model: MLP) -> jax.Array:
        return ((model(x) - y) ** 2).mean()

    @nnx.jit
    def step(model: MLP, optimizer: nnx.Optimizer) -> jax.Array:
        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    @nnx.vmap(in_axes=0, out_axes=0)
    def stack(key: jax.Array) -> nnx.Linear:
        return nnx.Linear(4, 4, rngs=nnx.Rngs(key))

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def through(x: jax.Array, layer: nnx.Linear) -> jax.Array:
        return layer(x)

    model = MLP(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    layers = stack(jax.random.split(jax.random.key(0), 3))
    linear, rngs = model.first, nnx.Rngs(0)
    graphdef, state = nnx.split(MLP(rngs))
    run_step = functools.partial(step, model, optimizer)
    rows: dict[str, Callable[[], Any]] = {
        "jit train step, 1st call": run_step,
        "jit train step, 2nd call": run_step,
        "jit train step, 3rd call": run_step,
        "value_and_grad, eager": lambda: nnx.value_and_grad(loss)(model),
        "scan over 3 layers": lambda: through(x, layers),
        "split, 1st": lambda: nnx.split(model),
        "split, 2nd": lambda: nnx.split(model),
        "split, 3rd": lambda: nnx.split(model),
        "merge": lambda: nnx.merge(graphdef, state),
        "Linear.__call__": lambda: linear(x),
        "Linear.__init__": lambda: nnx.Linear(4, 8, rngs=rngs),
    }
    print(tables.head(["call"], ["calls", "functions", "files"]))
    for name, call in rows.items():
        codes = followed(call)
        counts = len(codes), len({*codes}), files_of(codes)
        print(tables.line([name, *(f"{count:,}" for count in counts)]))
    print_layers()


if __name__ == "__main__":
    main()
