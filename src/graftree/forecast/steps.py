"""The forecast of a step: trace, compile for the target, read the program."""

from __future__ import annotations

import collections
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from graftree.core.graph import flattening, functional
from graftree.core.variables.kinds import Param
from graftree.core.variables.variables import is_variable
from graftree.forecast import costs, scopes, traffic
from graftree.forecast.hlo import Program
from graftree.forecast.reports import Forecast, Memory, Traffic, Work
from graftree.forecast.targets import Target, of_device
from graftree.sharding import placement
from graftree.training.optimizers import OptState
from graftree.transforms.compiled import jit


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
            target, as `nnx.get_abstract_model` and `nnx.sharding.init` make them, are
            compiled for that; others are put on the only device of ``target``.
        target: What to compile for; ``None`` if the shardings of the arguments say it.
        **kwargs: Keyword arguments of the function.

    Returns:
        A `Forecast`, which prints as a table.

    Raises:
        ValueError: If the arguments are on devices of several targets, or on real ones
            together with those; or if nothing says which target is meant.

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
    (args, kwargs), target, mesh = _placed((args, kwargs), target)
    if not hasattr(function, "lower"):
        function = jit.jit(function)
    start = time.perf_counter()
    lowered = function.lower(*args, **kwargs)  # type: ignore[attr-defined]
    traced = time.perf_counter()
    compiled = lowered.compile()
    arguments = _named(function, args, kwargs)
    return Forecast(
        target,
        mesh,
        memory=_memory(arguments, compiled, target),
        seconds=(traced - start, time.perf_counter() - traced),
        undivided=_undivided(arguments, len(target.devices)),
        **_read(Program(compiled.as_text()), target, mesh),
    )


def _named(function: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Maps the names of arguments to these."""
    try:
        return inspect.signature(function).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return {**{str(i): x for i, x in enumerate(args)}, **kwargs}


def _placed(
    arguments: Any, target: Target | None
) -> tuple[Any, Target, Mapping[str, int]]:
    """Makes arguments abstract, and finds the target and the axes of its mesh."""
    graphdef, state = functional.split(arguments, graph=True)
    meshes: dict[Any, None] = {}
    elsewhere: list[str] = []

    def note(path: Any, leaf: Any) -> None:
        for array in jax.tree.leaves(flattening.raw_of(leaf)):
            sharding = getattr(array, "sharding", None)
            if sharding is None:
                continue
            (device, *others) = sharding.device_set
            if of_device(device) is not None:
                meshes[
                    sharding.mesh if isinstance(sharding, NamedSharding) else None
                ] = None
            elif others:
                elsewhere.append(jax.tree_util.keystr(path))

    jax.tree.map_with_path(note, state, is_leaf=is_variable)
    target = _target_of(meshes, target, elsewhere)
    mesh = next(filter(None, meshes), None)

    def place(leaf: Any) -> Any:
        raw = jax.tree.map(
            lambda x: _abstract(x, target, mesh), flattening.raw_of(leaf)
        )
        return leaf.copy(raw) if is_variable(leaf) else raw

    placed = jax.tree.map(place, state, is_leaf=is_variable)
    sizes = dict(mesh.shape) if mesh is not None else {}
    return functional.merge(graphdef, placed), target, sizes


def _target_of(
    meshes: Mapping[Any, None], target: Target | None, elsewhere: Sequence[str]
) -> Target:
    targets = {
        of_device(mesh.devices.flat[0]): None for mesh in meshes if mesh is not None
    }
    if elsewhere and (targets or target is not None):
        raise ValueError(
            "nnx.forecast.step: some arguments are divided over devices of this "
            f"machine, not of the target.\n  at {', '.join(elsewhere[:3])}\nMake the "
            "model on the target's mesh: nnx.get_abstract_model(make, target.mesh(...))."
        )
    if len(targets) > 1 or (targets and target not in (None, *targets)):
        names = ", ".join(sorted({x.name for x in (*targets, target) if x is not None}))
        raise ValueError(
            f"nnx.forecast.step: the arguments are on devices of {names}.\nMake all of "
            "them on one mesh."
        )
    target = next(iter(targets), target)
    if target is None:
        raise ValueError(
            "nnx.forecast.step: nothing says which target is meant.\nMake the arguments "
            "on a mesh, nnx.get_abstract_model(make, target.mesh(...)), or pass a target "
            "of one device, as in target=nnx.forecast.target('h100')."
        )
    if not targets and len(target.devices) > 1:
        raise ValueError(
            f"nnx.forecast.step: {target.name!r} has {len(target.devices)} devices, and "
            "nothing says what is on which.\nMake the arguments on a mesh: "
            "nnx.get_abstract_model(make, target.mesh({...}))."
        )
    return target


def _abstract(x: Any, target: Target, mesh: Any) -> Any:
    """Describes an array that would be on the target; replicated if nothing else is said."""
    if not (hasattr(x, "shape") and hasattr(x, "dtype")):
        return x
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        sharding = target.sharding if mesh is None else NamedSharding(mesh, jax.P())
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _memory(arguments: Any, compiled: Any, target: Target) -> Memory:
    """Adds up what a device holds of the arguments, and what the compiler adds."""
    _, params, optimizer, rest = functional.split(
        arguments, Param, OptState, ..., graph=True
    )
    stats = compiled.memory_analysis()
    local = [placement.report(x).bytes_per_device for x in (params, optimizer, rest)]
    outputs = stats.output_size_in_bytes - stats.alias_size_in_bytes
    limit = target.accelerator.memory if target.accelerator is not None else None
    return Memory(*local, outputs, stats.temp_size_in_bytes, limit)


def _undivided(arguments: Any, num_devices: int) -> list[placement.PlacedArray]:
    """Lists the arrays that each device holds whole, largest first."""
    if num_devices == 1:
        return []
    rows = placement.report(arguments).rows
    whole = [row for row in rows if row.local_shape == row.shape and row.num_bytes > 0]
    return sorted(whole, key=lambda row: -row.num_bytes)


def _read(program: Program, target: Target, mesh: Mapping[str, int]) -> dict[str, Any]:
    """Adds up the costs of a program: of all, of each module, of each collective."""
    modules = collections.defaultdict[Any, Work](Work)
    sent = collections.defaultdict[Any, Traffic](Traffic)
    items, unknown, products = [], collections.Counter[str](), []
    num_devices = len(target.devices)
    for computation, count in program.runs():
        scope_by_name = scopes.scopes_of(computation)
        for instruction in computation.values():
            work = modules[scope_by_name[instruction.name]]
            work.bytes += count * costs.num_bytes(program, computation, instruction)
            work.largest = max(work.largest, costs.largest(instruction))
            for product in costs.products(program, computation, instruction):
                scope = scopes.scope_of(product.instruction.op_name)
                if not scope.path:
                    scope = scope_by_name[instruction.name]
                if product.count is None:
                    unknown[product.instruction.target] += count
                    continue
                modules[scope].flops += count * product.count
                products.append((count * product.count, product.is_8_bit))
        for item in traffic.collectives(program, computation, num_devices):
            scope = scope_by_name.get(item.instruction.name, scopes.Scope())
            modules[scope].sent += count * item.sent
            key = item.kind, item.axes(mesh) if mesh else ()
            sent[key].add(count, count * item.num_bytes, count * item.sent)
            items.append((item, count))
    accelerator, seconds = target.accelerator, {}
    if accelerator is not None:
        seconds = {
            "compute": sum(
                [
                    n / (accelerator.flops_8_bit if is_8_bit else accelerator.flops)
                    for n, is_8_bit in products
                ]
            ),
            "memory": sum([x.bytes for x in modules.values()])
            / accelerator.memory_bandwidth,
            "network": traffic.seconds(
                items, target.hosts, accelerator.link, accelerator.host_link
            ),
        }
    return {
        "modules": {k: v for k, v in modules.items() if any(v)},
        "traffic": dict(sent),
        "bounds": seconds,
        "unknown": dict(unknown),
        "unknown_loops": program.unknown_loops,
    }
