"""Layers against those of Flax NNX, over tables of cases; the peer is right in most.

`make test` compares one case in `STEP` of a table; `make test-all` all, and gradients.
"""

import inspect
import operator
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import catalog, modes, tables
from tests.nn.peer_cases import TABLES, Case, resolve

SEED = 3
PLAIN = int | float | str | tuple | None
NO_RNGS = {"PReLU", "RoPE", "RNN", "Bidirectional"}


class Subject:
    """The layer or function of a case, as one library makes it."""

    def __init__(self, case: Case, library: Any, seed: int = SEED):
        self.case, self.library = case, library
        self.rngs = library.Rngs(seed)
        if case.streams:
            seeds = {name: seed + n for n, name in enumerate(case.streams)}
            self.rngs = library.Rngs(**seeds)
        self.layer = operator.attrgetter(case.name)(library)
        if inspect.isclass(self.layer):
            with warnings.catch_warnings(action="ignore"):  # of older arguments
                self.layer = self._construct()
        row = catalog.BY_NAME.get(case.name)
        beyond = row.beyond.split() if row else ()
        # A function of ours is a wrapper.
        hidden = "_pytree__", "__wrapped__"
        names = [n for n in vars(self.layer) if not n.startswith(hidden)]
        self.attributes = [name for name in names if name not in beyond]
        self.created, self.counts = self.state(), self.state(self.rngs)
        if case.prepare is not None:
            case.prepare(self.layer)

    def _construct(self) -> Any:
        args, options = self._resolve(self.case.args, self.case.options, self.rngs, 0)
        if self.case.name not in NO_RNGS:
            options.setdefault("rngs", self.rngs)
        return self.layer(*args, **options)

    def _resolve(self, args: Any, options: Any, rngs: Any, seed: int) -> Any:
        return resolve(args, self.library, rngs, seed), {
            key: resolve(value, self.library, rngs, seed + 10)
            for key, value in options.items()
        }

    def state(self, node: Any = None) -> dict[tuple, tuple[str, np.ndarray]]:
        """Type, with its metadata ``note``, and value of the Variables, by path."""
        node = self.layer if node is None else node
        is_node = isinstance(node, self.library.Module | self.library.Rngs)
        return self._listed(self.library.state(node)) if is_node else {}

    def _listed(self, state: Any) -> dict[tuple, tuple[str, np.ndarray]]:
        flat = self.library.to_flat_state(state)
        return {path: (_kind(x), catalog.raw(x[...])) for path, x in flat}

    def __call__(self, seed: int) -> Any:
        """Calls the layer."""
        apply, inputs = self._call(seed)
        with self._warnings():
            return apply(self.layer, *inputs)

    def _warnings(self) -> warnings.catch_warnings:
        """Ignores those of the peer, about itself."""
        return warnings.catch_warnings(action=None if self.library is nnx else "ignore")

    def _call(self, seed: int) -> tuple[Callable, tuple]:
        """A function of the layer and the inputs; and the inputs."""
        rngs = self.library.Rngs(seed, dropout=seed + 1, carry=seed + 2)
        inputs, call = self._resolve(self.case.inputs, self.case.call, rngs, seed)

        def apply(layer: Any, *inputs: Any) -> Any:
            if isinstance(self.case.method, str):
                return getattr(layer, self.case.method)(*inputs, **call)
            return self.case.method(layer, *inputs, **call)

        return apply, inputs

    def in_jit(self, mode: dict[str, bool]) -> tuple[Any, dict]:
        """The outputs, and gradients of the sum of their squares, by one program."""
        apply, inputs = self._call(seed=0)

        def loss(layer: Any) -> tuple[jax.Array, Any]:
            outputs = apply(layer, *inputs)
            return sum((x**2).sum() for x in jax.tree.leaves(outputs)), outputs

        @self.library.jit(**mode)
        def call(layer: Any) -> Any:
            return self.library.grad(loss, has_aux=True)(layer)

        with self._warnings():
            gradients, outputs = call(self.layer)
        return outputs, self._listed(gradients)

    def load(self, other: "Subject") -> None:
        """Takes over the state of a layer, as a checkpoint would."""
        pure = other.library.to_pure_dict(other.library.state(other.layer))
        state = self.library.state(self.layer)
        self.library.replace_by_pure_dict(state, pure)
        self.library.update(self.layer, state)


def _kind(variable: Any) -> str:
    metadata = getattr(variable, "get_metadata", dict)()
    return f"{type(variable).__name__} {metadata.get('note', '')}"


# --------------------------------------------------------------------------- comparison


def compare(case: Case, peer: Any, limit: float = 0) -> list[str]:
    """Makes and calls the layer of a case in both libraries.

    Gives what differs, by more than ``limit`` ulps in outputs and in state after calls.
    """
    ours = Subject(case, nnx)
    outputs = [ours(seed) for seed in range(case.calls)]
    try:
        theirs = Subject(case, peer)
        expected = [theirs(seed) for seed in range(case.calls)]
    except Exception as error:
        if not case.why_different:
            raise
        return [f"the peer raises {error!r}"]
    return [
        *_of_construction(ours, theirs),
        *of_outputs(outputs, expected, limit),
        *unequal(ours.state(), theirs.state(), limit),
    ]


def _of_construction(ours: Subject, theirs: Subject) -> Iterator[str]:
    if ours.attributes != theirs.attributes:
        yield f"attributes are {ours.attributes}, those of the peer {theirs.attributes}"
    for name in set(ours.attributes) & set(theirs.attributes):
        a, b = (getattr(subject.layer, name) for subject in (ours, theirs))
        a, b = (getattr(value, "__name__", value) for value in (a, b))
        if isinstance(a, PLAIN) and a != b:
            yield f"{name} is {a!r}, in the peer {b!r}"
    yield from unequal(ours.created, theirs.created)
    yield from unequal(ours.counts, theirs.counts)


def of_outputs(outputs: Any, expected: Any, limit: float) -> Iterator[str]:
    structure, other = jax.tree.structure(outputs), jax.tree.structure(expected)
    if structure != other:
        yield f"outputs are {structure}, those of the peer {other}"
        return
    for a, b in zip(jax.tree.leaves(outputs), jax.tree.leaves(expected), strict=True):
        ulps = difference(catalog.raw(a), catalog.raw(b))
        if not ulps <= limit:
            yield f"outputs are {ulps:.3g} ulps apart: {a.dtype}{a.shape}, {b.dtype}"


def unequal(ours: dict, theirs: dict, limit: float = 0) -> list[str]:
    """What differs between two states: paths and their order, types, numbers."""
    if list(ours) != list(theirs):
        return [f"paths are {list(ours)}, those of the peer {list(theirs)}"]
    found = []
    for path, (kind, value) in ours.items():
        expected_kind, expected = theirs[path]
        if kind != expected_kind:
            found.append(f"{path} is a {kind}, in the peer a {expected_kind}")
        if not difference(value, expected) <= limit:
            found.append(f"{path} is {value}, in the peer {expected}")
    return found


def difference(a: np.ndarray, b: np.ndarray) -> float:
    """In ulps; infinite if shape, dtype or the places of NaNs differ."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return np.inf
    if a.tobytes() == b.tobytes():
        return 0
    if not jnp.issubdtype(a.dtype, jnp.inexact):
        return np.inf
    epsilon = float(jnp.finfo(a.dtype).eps)
    wide = np.result_type(np.float64, a.dtype) if a.dtype.kind == "c" else np.float64
    a, b = a.astype(wide), b.astype(wide)
    is_same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        absolute = np.where(is_same, 0, np.abs(a - b)).max(initial=0)
    scale = np.max(np.abs(b), initial=0, where=np.isfinite(b))
    return absolute / (scale * epsilon) if scale else np.inf


DIFFERENT = [x for table in TABLES.values() for x in table() if x.why_different]
# Ulps. Elsewhere every bit is equal. These were compiled as a whole once, which rounds
# otherwise than one operation after the other.
LIMITS = {"MultiHeadAttention": 4, "dot_product_attention": 4, "RoPE": 4}
ROWS = [row for row in catalog.LAYERS if row.name in TABLES]
STEP, LONG = 16, pytest.mark.long


@pytest.fixture(autouse=True)
def newest_peer():
    """Compares with the release that we follow."""
    pytest.importorskip("flax", minversion="0.12.12")


def agreeing(table):
    return [case for case in TABLES[table]() if not case.why_different]


@tables.cases("start", 0, *(pytest.param(n, marks=LONG) for n in range(1, STEP)))
@pytest.mark.parametrize("table", TABLES)
def test_layers_equal_those_of_the_peer(peer, table, start):
    limit = LIMITS.get(table, 0)
    found = [
        f"{case}\n    {problem}"
        for case in agreeing(table)[start::STEP]
        for problem in compare(case, peer, limit)
    ]
    assert not found, "\n".join([f"{len(found)} differences:", *found])


@pytest.mark.parametrize(
    "case",
    [pytest.param(x, marks=LONG if i % 4 else ()) for i, x in enumerate(DIFFERENT)],
    ids=lambda case: f"{case.name}: {case.why_different}",
)
def test_where_the_peer_is_wrong_we_differ(peer, case):
    assert compare(case, peer)


@LONG
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
@pytest.mark.parametrize("mode", [modes.GRAPH, modes.TREE], ids=["graph", "tree"])
def test_outputs_and_gradients_inside_jit_equal_those_of_the_peer(peer, row, mode):
    ours, theirs = (Subject(agreeing(row.name)[0], library) for library in (nnx, peer))
    (outputs, gradients), (expected, of_peer) = ours.in_jit(mode), theirs.in_jit(mode)
    assert not [*of_outputs(outputs, expected, limit=8)]
    assert not unequal(gradients, of_peer, limit=8)
    assert not unequal(ours.state(), theirs.state(), limit=8)


@catalog.of_families(ROWS)
def test_states_are_interchangeable(peer, row):
    case, limit = agreeing(row.name)[0], LIMITS.get(row.name, 0)
    for giver, taker in ((nnx, peer), (peer, nnx)):
        source, target = Subject(case, giver), Subject(case, taker, seed=8)
        target.load(source)
        assert not [*of_outputs(target(0), source(0), limit)]
        assert not unequal(source.state(), target.state(), limit)


def test_every_layer_is_in_the_grid(peer):
    def is_layer(name, value):
        return inspect.isclass(value) and value.__module__.startswith("graftree.nn.")

    layers = {name for name in nnx.__all__ if is_layer(name, getattr(nnx, name))}
    theirs = {name for name in layers if hasattr(peer, name)}
    assert theirs - {"LoRAParam", "RNNCellBase", "Sequential"} <= set(TABLES)
