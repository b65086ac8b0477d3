"""The table of all transforms, and of what each lets through in each mode.

A row calls a function of the user, ``body(*objects, x)``, in one transform. All leaves
have the shape of `X` and bodies work element by element, so that a mapped function
computes what a jitted one does, and one expected value serves all rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import comparisons
from tests.modes import BY_NAME, VALUES

MODES, PLAIN = tuple(BY_NAME), tuple(VALUES)
X = jnp.array([10.0, 20.0])
MESH = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("d",))
SPEC = jax.sharding.PartitionSpec("d")


# ----------------------------------------------------------------------- the transforms


@dataclasses.dataclass(frozen=True)
class Row:
    """One way to call a function in a transform.

    Attributes:
        call: Called as ``call(body, args, mode)``; gives the output of the body.
        modes: Those that the transform has.
        transform: Its public name.
        inputs: A pattern of the path of the first argument in messages.
        is_fixed: Whether nothing but the values of Variables may change, as the result
            is the argument of the next iteration.
        drops: The modes in which changes of the arguments are not kept.
        has_output: Whether the output of the body comes back.
        traces: Whether JAX traces the body. If not, it may write what it captures.
        writes_all: The modes in which Variables that didn't change are written too.
    """

    call: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
    transform: str
    modes: tuple[str, ...] = MODES
    inputs: str = r"\.args"
    is_fixed: bool = False
    drops: tuple[str, ...] = ()
    has_output: bool = True
    traces: bool = True
    writes_all: tuple[str, ...] = ()


def _scalar(body):
    """A differentiable function with the output of the body beside its value."""

    def loss(*args):
        return jnp.sum(args[-1]), body(*args)

    return loss


def _derivative(derive):
    """A row that differentiates all arguments, as aliases of them must agree."""

    def call(body, args, mode):
        argnums = tuple(range(len(args)))
        return derive(_scalar(body), argnums=argnums, has_aux=True, **mode)(*args)

    return call


def _applied(transform, **options):
    """A row that calls what the transform makes of the function."""
    return lambda f, args, mode: transform(f, **options, **mode)(*args)


_UNMAPPED = {"in_axes": None, "out_axes": None}


def _custom_vjp(body, args, mode):
    f = nnx.custom_vjp(body, **mode)
    f.defvjp(lambda *args: (f(*args), None), lambda residual, g: None)
    return f(*args)


def _jit_partial(body, args, mode):
    return nnx.jit_partial(body, *args[:-1], **mode)(args[-1])


def _cached_partial(body, args, mode):
    return nnx.cached_partial(nnx.jit(body, **mode), *args[:-1], **mode)(args[-1])


def _scan_carry(body, args, mode):
    def step(carry, x):
        return carry, body(*carry, x)

    carry = (nnx.Carry, 0)
    scanned = nnx.scan(step, in_axes=carry, out_axes=carry, **mode)
    return scanned(args[:-1], args[-1][None])[1]


def _scan_broadcast(body, args, mode):
    axes = (*[None for _ in args[:-1]], 0)
    scanned = nnx.scan(body, in_axes=axes, out_axes=0, **mode)
    return scanned(*args[:-1], args[-1][None])


def _vjp(body, args, mode):
    return nnx.vjp(_scalar(body), *args, has_aux=True, **mode)[2]


def _jvp(body, args, mode):
    """The tangents are the primals, which have the types that tangents must have."""
    return nnx.jvp(_scalar(body), args, args, has_aux=True, **mode)[2]


def _while_loop(body, args, mode):
    def step(value):
        args, n = value
        body(*args)
        return args, n + 1

    nnx.while_loop(lambda value: value[1] < 1, step, (args, 0), **mode)


def _fori_loop(body, args, mode):
    def step(_, args):
        body(*args)
        return args

    nnx.fori_loop(0, 1, step, args, **mode)


def _transform_metadata(body, args, mode):
    axes = {"in_axes": 0, "out_axes": 0, "partition": "p"}
    return nnx.transform_metadata(body, **axes, graph=mode["graph"])(*args)


_LOOP = {"inputs": r"\.init_val", "is_fixed": True, "has_output": False}
_BRANCHES = {"inputs": r"\.operands", "writes_all": MODES}
ROWS = {
    "jit": Row(_applied(nnx.jit), "jit"),
    "compiled": Row(
        lambda f, args, mode: nnx.jit(f, **mode).lower(*args).compile()(*args), "jit"
    ),
    "jit_partial": Row(_jit_partial, "jit_partial", PLAIN),
    "cached_partial": Row(
        _cached_partial, "cached_partial", ("graph_updates",), is_fixed=True
    ),
    "grad": Row(lambda f, args, mode: _derivative(nnx.grad)(f, args, mode)[1], "grad"),
    "value_and_grad": Row(
        lambda f, args, mode: _derivative(nnx.value_and_grad)(f, args, mode)[0][1],
        "value_and_grad",
    ),
    "vjp": Row(_vjp, "vjp", PLAIN, r"\.primals"),
    "jvp": Row(_jvp, "jvp", PLAIN, r"\.primals"),
    "custom_vjp": Row(_custom_vjp, "custom_vjp", traces=False),
    "remat": Row(_applied(nnx.remat), "remat"),
    "vmap": Row(_applied(nnx.vmap), "vmap"),
    "vmap broadcast": Row(_applied(nnx.vmap, **_UNMAPPED, axis_size=2), "vmap"),
    "pmap": Row(_applied(nnx.pmap), "pmap"),
    "shard_map": Row(
        _applied(nnx.shard_map, mesh=MESH, in_specs=SPEC, out_specs=SPEC),
        "shard_map",
        writes_all=("graph_updates",),
    ),
    "scan": Row(_applied(nnx.scan, in_axes=0, out_axes=0), "scan"),
    "scan carry": Row(_scan_carry, "scan", inputs=r"\.carry", is_fixed=True),
    "scan broadcast": Row(
        _scan_broadcast, "scan", is_fixed=True, drops=("graph_updates",)
    ),
    "while_loop": Row(_while_loop, "while_loop", **_LOOP),
    "fori_loop": Row(_fori_loop, "fori_loop", **_LOOP),
    "cond": Row(
        lambda f, args, mode: nnx.cond(True, f, f, *args, **mode), "cond", **_BRANCHES
    ),
    "switch": Row(
        lambda f, args, mode: nnx.switch(1, [f, f], *args, **mode),
        "switch",
        **_BRANCHES,
    ),
    "checkify": Row(lambda f, x, mode: nnx.checkify(f, **mode)(*x)[1], "checkify"),
    "eval_shape": Row(
        lambda f, x, mode: nnx.eval_shape(f, *x, **mode), "eval_shape", drops=MODES
    ),
    "make_jaxpr": Row(
        _applied(nnx.make_jaxpr), "make_jaxpr", PLAIN, drops=MODES, has_output=False
    ),
    "transform_metadata": Row(
        _transform_metadata, "transform_metadata", PLAIN, traces=False
    ),
}


# Compiles each operation on its own, which takes long; tests about the arguments and
# outputs of any transform leave it out.
SLOW = ("shard_map",)


@dataclasses.dataclass(frozen=True)
class Case:
    """A row in one of its modes."""

    row: Row
    mode: str

    def __call__(self, body: Callable[..., Any], *objects: Any) -> Any:
        """The output of the body for these objects and `X`."""
        return self.row.call(body, (*objects, X), BY_NAME[self.mode])

    @property
    def shares(self) -> bool:
        """Whether aliases are kept."""
        return self.mode != "tree"

    @property
    def keeps_values(self) -> bool:
        """Whether new values reach the Variables of the caller."""
        return self.mode not in self.row.drops

    @property
    def writes_all(self) -> bool:
        """Whether Variables that didn't change are written too."""
        return self.mode in self.row.writes_all

    @property
    def keeps_structure(self) -> bool:
        """Whether changes of the structure reach the objects of the caller."""
        return self.mode == "graph_updates" and self.keeps_values


def cases(
    condition: Callable[[Row], bool] = lambda row: True,
    *,
    rows: dict[str, Row] = ROWS,
    modes: tuple[str, ...] = MODES,
    without: tuple[str, ...] = (),
) -> pytest.MarkDecorator:
    """Runs a test in all rows that fulfill a condition, in each mode that they have."""
    listed = [
        pytest.param(Case(row, mode), id=f"{name}-{mode}")
        for name, row in rows.items()
        if condition(row) and name not in without
        for mode in row.modes
        if mode in modes
    ]
    return pytest.mark.parametrize("case", listed)


# --------------------------------------------------------------------- what is compared


def tracers_in(x: Any, seen: set[int] | None = None) -> list[Any]:
    """The tracers in an object: in values, metadata, static attributes, containers."""
    seen = set() if seen is None else seen
    if id(x) in seen:
        return []
    seen.add(id(x))
    if isinstance(x, jax.core.Tracer):
        return [x]
    if isinstance(x, nnx.Variable):
        inside = [x.get_raw_value(), x.get_metadata()]
    elif isinstance(x, nnx.Pytree):
        inside = list(vars(x).values())
    elif isinstance(x, (dict, nnx.State)):
        inside = [*x.keys(), *x.values()]
    elif isinstance(x, (list, tuple, set, frozenset)):
        inside = list(x)
    else:
        inside = []
    return [tracer for child in inside for tracer in tracers_in(child, seen)]


# One for each mode, which compiles once for all objects of a structure.
PASS = {name: nnx.jit(lambda *args: None, **mode) for name, mode in BY_NAME.items()}


def facts(case: Case, x: Any) -> Any:
    """Identities and facts of all that the row must leave as it is."""
    return [
        (path, own if case.writes_all and type(own) is list else (identity, own))
        for path, identity, own in comparisons.snapshot(x)
    ]


def check_usable(case: Case, *objects: Any) -> None:
    """Asserts that objects hold no tracer, and can be written and passed again."""
    assert not tracers_in(objects)
    before = comparisons.snapshot(objects)
    PASS[case.mode](*objects)
    assert comparisons.snapshot(objects) == before
    for _, variable in nnx.iter_graph(objects, graph=True):
        if isinstance(variable, nnx.Variable):
            variable.set_value(jax.tree.map(lambda x: x + 1, variable.get_value()))
            variable.set_metadata(usable=True)


def write(variable: nnx.Variable, value: Any) -> None:
    """Writes the whole value, as an expression."""
    variable[...] = value


def flat(x: Any) -> list[float]:
    """The numbers in a value, whatever its shape."""
    return np.ravel(x[...] if isinstance(x, nnx.Variable) else x).tolist()
