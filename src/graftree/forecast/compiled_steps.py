"""The forecast of a step: trace, compile for the target, read the program."""

from __future__ import annotations

import collections
import re
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from graftree import _jax, _python
from graftree.forecast import costs, placed_arguments, progress, scopes, undivided
from graftree.forecast.forecasts import Activation, Forecast, Memory
from graftree.forecast.hlo import Program
from graftree.forecast.placed_arguments import PlacedArguments
from graftree.forecast.targets import Target
from graftree.sharding.placement import PlacedArray
from graftree.transforms.compiled import jit
from graftree.transforms.lifting import jaxprs


def step(
    function: Callable[..., Any],
    *args: Any,
    target: Target | None = None,
    **kwargs: Any,
) -> Forecast:
    """Compiles a step for a target, and says what it costs there. Nothing is run.

    Args:
        function: The step: an ``nnx.jit`` or ``jax.jit`` function, or any other, which
            is compiled with `nnx.jit`.
        *args: What it takes, abstract or not. Arrays with a sharding on a mesh of a
            target, as `nnx.get_abstract_model` makes them, are compiled for that;
            arrays that are on no device in particular are whole on each of its devices,
            as JAX would have them.
        target: What to compile for, if it has one device; ``None`` if the shardings of
            the arguments say it.
        **kwargs: Keyword arguments of the function.

    Returns:
        A `Forecast`, which prints as a table. Where the compiler refuses the program
        because it needs more memory than there is, as those of TPUs do, it has the
        memory alone.

    Raises:
        ValueError: If the arguments are on several targets or meshes, or on real
            devices together with those; or if nothing says which target is meant.
        Exception: What JAX or the compiler raises for a program that can't be compiled
            for the target; a note names the module.

    Example:
        >>> mesh = nnx.forecast.target("cpu:4").mesh({"data": 4})
        >>> model = nnx.merge(*nnx.get_abstract_model(
        ...     lambda: nnx.Linear(128, 256, use_bias=False, rngs=nnx.Rngs(0)), mesh))
        >>> x = jax.ShapeDtypeStruct(
        ...     (32, 128), jnp.float32, sharding=jax.NamedSharding(mesh, jax.P("data")))
        >>> forecast = nnx.forecast.step(lambda model, x: model(x), model, x)
        >>> forecast.memory.parameters, forecast.flops == 2 * 8 * 128 * 256
        (131072, True)
    """
    placed = placed_arguments.place(function, args, kwargs, target)
    if not hasattr(function, "lower"):
        function = jit.jit(function)
    start = time.perf_counter()
    traced = function.trace(*placed.args, **placed.kwargs)  # type: ignore[attr-defined]
    traced_at = time.perf_counter()
    name = getattr(function, "__name__", "a function")
    with progress.shown(f"compiling {name} for {placed.target.name}"):
        compiled = _compile(traced, placed.target)
    seconds = traced_at - start, time.perf_counter() - traced_at
    work = None
    if compiled.program is not None:
        work = costs.costs_of(compiled.program, placed.target, placed.mesh)
    return Forecast(
        placed.target,
        {} if placed.mesh is None else dict(placed.mesh.shape),
        _memory(placed, compiled, _constants(traced.jaxpr)),
        work,
        _undivided(placed),
        _activations(placed, compiled),
        seconds,
    )


_OUT_OF_MEMORY = re.compile(
    r"RESOURCE_EXHAUSTED.*?\((?P<used>[\d.]+)(?P<unit>[KMGT]?)\).*?available HBM",
    re.DOTALL,
)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class _CompiledStep(NamedTuple):
    """What a compiler says.

    Attributes:
        lowered: What it was asked to compile, a stage of JAX.
        program: The program of one device; ``None`` if it needs too much memory for a
            compiler that refuses that.
        outputs: Bytes of results that don't take the place of arguments.
        temporaries: Bytes at the peak of what the program makes for itself.
        total: All bytes that a device holds; ``None`` where `program` says it.
    """

    lowered: Any
    program: Program | None
    outputs: int
    temporaries: int
    total: int | None = None


def _compile(traced: Any, target: Target) -> _CompiledStep:
    """Compiles a traced function for the devices of its arguments.

    Raises:
        Exception: What JAX or the compiler raises, with a note that names the target,
            and the module if it is known.
    """
    lowered = None
    try:
        lowered = traced.lower()
        with warnings.catch_warnings():
            # JAX keeps programs for devices that aren't there, and can't read them.
            warnings.filterwarnings("ignore", "Error reading persistent compilation")
            compiled = lowered.compile()
    except Exception as error:
        if match := _OUT_OF_MEMORY.search(str(error)):
            total = int(float(match["used"]) * _UNITS[match["unit"]])
            return _CompiledStep(lowered, None, 0, 0, total)
        name = _name_of_lowering(traced) if lowered is None else _name_in_text(error)
        error.add_note(_note(name, target))
        raise
    stats = compiled.memory_analysis()
    outputs = stats.output_size_in_bytes - stats.alias_size_in_bytes
    program, temporaries = Program(compiled.as_text()), stats.temp_size_in_bytes
    return _CompiledStep(lowered, program, outputs, temporaries)


def _note(name: str, target: Target) -> str:
    """Says for what a program couldn't be compiled, and where it is at fault."""
    where = "; the compiler doesn't name the operation"
    if name:
        path = ".".join(scopes.scope_of(name).path)
        where = f", because of {name.rpartition('/')[2]!r}"
        where += f" in {path}" if path else ""
    return f"nnx.forecast.step: this does not compile for {target.name!r}{where}."


def _name_in_text(error: BaseException) -> str:
    """Finds the operation that a compiler names."""
    match = re.search(r'op_name="([^"]*)"', str(error))
    return match[1] if match else ""


def _name_of_lowering(traced: Any) -> str:
    """Lowers once more, to find the operation for which JAX raises, in its frames.

    By default JAX takes these out of the tracebacks that users see.
    """
    filtering = _jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    names, primitive = [], ""
    try:
        traced.lower()
    except Exception as error:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            equation: Any = _python.locals_of(frame).get("eqn")
            if hasattr(equation, "primitive"):
                names.append(f"{equation.source_info.name_stack}")
                primitive = equation.primitive.name
    finally:
        jax.config.update("jax_traceback_filtering", filtering)
    return "/".join([*filter(None, names), primitive])


def _constants(program: Any) -> int:
    """Adds up the bytes of arrays that a function closes over."""
    arrays, pending = dict[int, Any](), [program]
    while pending:
        jaxpr, constants = jaxprs.opened(pending.pop())
        arrays.update((id(x), x) for x in constants)
        for equation in jaxpr.eqns:
            literals = [x.val for x in equation.invars if isinstance(x, jaxprs.Literal)]
            arrays.update((id(x), x) for x in literals)
            parameters = jax.tree.leaves(
                [*equation.params.values()],
                is_leaf=lambda x: isinstance(x, jaxprs.PROGRAMS),
            )
            pending += [x for x in parameters if isinstance(x, jaxprs.PROGRAMS)]
    return sum([x.nbytes for x in arrays.values() if getattr(x, "shape", ())])


def _memory(placed: PlacedArguments, compiled: _CompiledStep, constants: int) -> Memory:
    """Adds up what a device holds of the arguments, and what the compiler adds."""
    sizes = collections.Counter[str]()
    for row, role in placed.arrays:
        sizes[role] += row.local_bytes
    temporaries = compiled.temporaries
    if compiled.total is not None:
        temporaries = max(compiled.total - sizes.total() - constants, 0)
    accelerator = placed.target.accelerator
    return Memory(
        sizes[placed_arguments.PARAMETERS],
        sizes[placed_arguments.OPTIMIZER],
        sizes[placed_arguments.OTHERS],
        compiled.outputs,
        temporaries,
        None if accelerator is None else accelerator.memory,
        constants,
    )


def _undivided(placed: PlacedArguments) -> list[PlacedArray]:
    """Lists the arrays that each device holds whole, largest first."""
    if placed.mesh is None or placed.mesh.size == 1:
        return []
    rows = [row for row, _ in placed.arrays]
    whole = [row for row in rows if row.local_shape == row.shape and row.num_bytes > 0]
    return sorted(whole, key=lambda row: -row.num_bytes)


def _activations(
    placed: PlacedArguments, compiled: _CompiledStep
) -> list[Activation] | None:
    """Lists the large arrays that each device makes whole, largest first."""
    if compiled.program is None:
        return None
    if placed.mesh is None or placed.mesh.size == 1:
        return []
    return undivided.arrays(
        compiled.lowered.as_text("hlo", debug_info=True),
        compiled.program,
        placed.mesh.shape,
        [row for row, role in placed.arrays if role != placed_arguments.OTHERS],
        compiled.outputs + compiled.temporaries,
    )
