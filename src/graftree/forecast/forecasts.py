"""What a step costs: in total, by module, by collective; as text, HTML and JSON."""

from __future__ import annotations

import collections
import dataclasses
import html
import json
from collections.abc import Mapping, Sequence
from typing import Any

from graftree.core.text import descriptions
from graftree.forecast import pictures
from graftree.forecast.scopes import Scope
from graftree.forecast.targets import Target
from graftree.forecast.traffic import Traffic
from graftree.sharding.placement import PlacedArray

_COLUMNS = ("flops", "bytes", "sent", "largest")
_NUM_UNDIVIDED = 5  # arrays that the text lists

Rows = Sequence[Sequence[str]]


@dataclasses.dataclass
class Work:
    """What is done in one module, on one device.

    Attributes:
        flops: Operations of products and convolutions.
        bytes: Bytes read from and written to the device's memory.
        sent: Bytes sent to other devices.
        largest: Bytes of the largest array that is made.

    Example:
        >>> work = nnx.forecast.Work(flops=10, largest=4)
        >>> work.add(nnx.forecast.Work(flops=5, largest=2))
        >>> work
        Work(flops=15, bytes=0, sent=0.0, largest=4)
    """

    flops: int = 0
    bytes: int = 0
    sent: float = 0.0
    largest: int = 0

    def __bool__(self) -> bool:
        return any(dataclasses.astuple(self))

    def add(self, other: Work) -> None:
        """Adds what is done in another module."""
        self.flops += other.flops
        self.bytes += other.bytes
        self.sent += other.sent
        self.largest = max(self.largest, other.largest)


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes that a device holds at once.

    Attributes:
        parameters: Of the Params in the arguments, frozen or not.
        optimizer: Of the state of optimizers.
        others: Of the other arguments.
        outputs: Of results that don't take the place of arguments.
        temporaries: Of what the step makes for itself, at its peak.
        limit: What programs can have of the device's memory; ``None`` for a CPU, of
            which it is unknown.
        constants: Of arrays that the function closes over, which are part of the
            program. Pass them as arguments, to have them divided.

    Example:
        >>> memory = nnx.forecast.Memory(400, 800, 50, 0, 300, limit=1600)
        >>> memory.arguments, memory.total, memory.fits
        (1250, 1550, True)
    """

    parameters: int
    optimizer: int
    others: int
    outputs: int
    temporaries: int
    limit: float | None
    constants: int = 0

    @property
    def arguments(self) -> int:
        """Bytes of all arguments."""
        return self.parameters + self.optimizer + self.others

    @property
    def total(self) -> int:
        """Bytes of all together."""
        return self.arguments + self.outputs + self.temporaries + self.constants

    @property
    def fits(self) -> bool | None:
        """Whether the memory is enough; ``None`` if the limit is unknown."""
        return None if self.limit is None else self.total <= self.limit


@dataclasses.dataclass(frozen=True)
class Costs:
    """What a compiled program does, on one device.

    Attributes:
        modules: The `Work` of each `Scope`: a path in the arguments of the function,
            forward or backward. What has no path is at the empty one.
        traffic: The `Traffic` of each kind of collective and tuple of axes.
        times: Seconds to compute, to read and write memory, to send, each at its peak;
            empty for a CPU, of which there are no figures.
        unknown: Functions of libraries whose operations can't be counted, and how often
            they are called.
        unknown_loops: How many loops of unknown length count as one turn.

    Example:
        >>> target = nnx.forecast.target("cpu")
        >>> x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
        >>> forecast = nnx.forecast.step(lambda x: x @ x, x, target=target)
        >>> [work.flops for work in forecast.costs.modules.values()]
        [1024]
    """

    modules: Mapping[Scope, Work]
    traffic: Mapping[tuple[str, tuple[str, ...]], Traffic]
    times: Mapping[str, float]
    unknown: Mapping[str, int]
    unknown_loops: int


@dataclasses.dataclass(frozen=True)
class Activation:
    """Arrays of one shape that a module makes, and that each device makes whole.

    Attributes:
        path: The module, as in ``model.blocks[0]``; empty if there is none.
        operation: What makes one of them, as in ``dot_general``.
        dtype: In the spelling of XLA, as in ``bf16``.
        shape: The shape of a whole one; what a device has if only that is known.
        num_bytes: The size of the largest on a device.
        count: Number of operations that make one.
        way_out: An axis of the mesh, and the axis of the array that it could divide;
            ``None`` if it isn't known whether the arrays are divided.

    Example:
        >>> mesh = nnx.forecast.target("cpu:4").mesh({"data": 4})
        >>> sharding = jax.NamedSharding(mesh, jax.P())
        >>> x = jax.ShapeDtypeStruct((8, 64), jnp.float32, sharding=sharding)
        >>> forecast = nnx.forecast.step(lambda x: jnp.sin(x @ x.T), x)
        >>> [(row.shape, row.way_out) for row in forecast.activations]
        [((8, 8), ('data', 0))]
    """

    path: str
    operation: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    count: int
    way_out: tuple[str, int] | None


@dataclasses.dataclass(frozen=True, repr=False)
class Forecast:
    """What a step costs on a target, for each device; prints as a table.

    Times are what the figures of the accelerator allow, with each resource used all the
    time and at its peak. No step is faster than it computes and sends. The bytes of its
    memory are those of a program of which nothing stays in a cache; a GPU may do with
    less where arrays are smaller than its L2 cache, so that time is an estimate.

    Attributes:
        target: What it was compiled for.
        mesh: The size of each axis of the mesh; empty for one device.
        memory: What a device holds.
        costs: What it does; ``None`` where the compiler refuses the program because it
            doesn't fit.
        undivided: Arrays in the arguments that each device holds whole.
        activations: Large arrays that each device makes whole, or of which that isn't
            known; ``None`` where the program isn't.
        seconds: How long tracing and compiling took.

    Example:
        >>> target = nnx.forecast.target("cpu")
        >>> x = jax.ShapeDtypeStruct((128, 128), jnp.float32)
        >>> print(nnx.forecast.step(lambda x: x @ x, x, target=target))
        cpu: 1 device
        <BLANKLINE>
        memory of a device
          parameters        0 B
          optimizer         0 B
          other arguments   64 KiB
          outputs           64 KiB
          temporaries       0 B
          total             128 KiB
        <BLANKLINE>
        a step of a device               at its peak
          compute           4.194 Mflop  unknown
          memory            131.1 kB     unknown
          network           0 B          unknown
    """

    target: Target
    mesh: Mapping[str, int]
    memory: Memory
    costs: Costs | None
    undivided: Sequence[PlacedArray]
    activations: Sequence[Activation] | None
    seconds: tuple[float, float]

    def _sum(self, column: str) -> Any:
        if self.costs is None:
            return None
        return sum([getattr(work, column) for work in self.costs.modules.values()])

    @property
    def flops(self) -> int | None:
        """Operations of products and convolutions: those that can be counted.

        ``None`` if there are none but others.
        """
        return self._sum("flops") or (None if self._is_more_unknown() else 0)

    def _is_more_unknown(self) -> bool:
        """Whether there are operations that can't be counted."""
        return self.costs is None or bool(self.costs.unknown)

    @property
    def bytes(self) -> int | None:
        """Bytes read from and written to memory."""
        return self._sum("bytes")

    @property
    def sent(self) -> float | None:
        """Bytes sent to other devices."""
        return self._sum("sent")

    @property
    def bound(self) -> float | None:
        """Seconds that this program takes at least, to compute and to send.

        ``None`` where that is unknown.
        """
        times = {} if self.costs is None else self.costs.times
        return max([times[x] for x in times if x != "memory"], default=None)

    @property
    def estimate(self) -> float | None:
        """Seconds by the resource that is busy longest, memory included."""
        times = {} if self.costs is None else self.costs.times
        return max(times.values(), default=None)

    @property
    def bottleneck(self) -> str:
        """That resource: ``"compute"``, ``"memory"``, ``"network"``, ``"unknown"``."""
        times = {} if self.costs is None else self.costs.times
        return max(times, key=lambda name: times[name], default="unknown")

    def rate(self, count: float) -> float | None:
        """Returns how many of something in a step a device can't exceed in a second.

        Args:
            count: Number of samples or tokens in a step, on all devices.

        Example:
            >>> target = nnx.forecast.target("cpu")
            >>> x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
            >>> print(nnx.forecast.step(lambda x: x @ x, x, target=target).rate(8))
            None
        """
        if self.bound is None:
            return None
        return count / self.bound / len(self.target.devices)

    def by_module(
        self, depth: int | None = None, sort: str | None = None
    ) -> list[tuple[Scope, Work]]:
        """Adds up the work by module.

        Args:
            depth: How many names of a path to tell apart; ``None`` for all.
            sort: ``"flops"``, ``"bytes"``, ``"sent"`` or ``"largest"``: the most first;
                ``None``: in the order of the program.

        Returns:
            Pairs of a `Scope` and its `Work`, whose sum is the whole.

        Raises:
            ValueError: If ``sort`` is something else.

        Example:
            >>> target = nnx.forecast.target("cpu")
            >>> abstract = nnx.eval_shape(lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0)))
            >>> x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
            >>> forecast = nnx.forecast.step(
            ...     lambda model, x: model(x), abstract, x, target=target)
            >>> forecast.by_module(sort="flops")[0][0].path
            ('model',)
        """
        if sort not in (None, *_COLUMNS):
            raise ValueError(
                f"Forecast.by_module: there is no column {sort!r}.\n"
                f"Sort by one of {', '.join(_COLUMNS)}."
            )
        rows = collections.defaultdict[Scope, Work](Work)
        for scope, work in self.costs.modules.items() if self.costs else ():
            rows[scope._replace(path=scope.path[:depth])].add(work)
        pairs = [*rows.items()]
        if sort is not None:
            pairs.sort(key=lambda pair: -getattr(pair[1], sort))
        return pairs

    def table(self, depth: int | None = 3, sort: str | None = None) -> str:
        """Writes the work by module as a table; the arguments are `by_module`'s."""
        return "\n".join(descriptions.aligned(self._module_rows(depth, sort)))

    def __str__(self) -> str:
        sections = ["\n".join(descriptions.aligned(rows)) for rows in self._sections()]
        return "\n\n".join([self._title(), *sections])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Shows it in a notebook, with the modules."""
        tables = map(html_table, [*self._sections(), self._module_rows(3, "flops")])
        return f"<b>{html.escape(self._title())}</b>{''.join(tables)}"

    def _title(self) -> str:
        count = len(self.target.devices)
        axes = ", ".join(f"{name}={size}" for name, size in self.mesh.items())
        devices = f"{count} device" + "s" * (count > 1)
        return f"{self.target.name}: {devices}" + (f", {axes}" if axes else "")

    def _sections(self) -> list[Rows]:
        rows = [self._memory_rows(), self._time_rows(), self._traffic_rows()]
        rows += [self._undivided_rows(), self._activation_rows(), self._unknown_rows()]
        return [*filter(None, rows)]

    def _module_rows(self, depth: int | None, sort: str | None) -> Rows:
        cells = [
            (
                ".".join(scope.path) or "-",
                "backward" if scope.is_backward else "forward",
                *map(text_of_count, dataclasses.astuple(work)),
            )
            for scope, work in self.by_module(depth, sort)
        ]
        head = ("module", "pass", "flop", "bytes", "sent", "largest array")
        total = map(text_of_count, (self.flops, self.bytes, self.sent))
        return [head, *descriptions.folded_rows(cells), ("total", "", *total, "")]

    def _memory_rows(self) -> Rows:
        memory = self.memory
        rows = [
            ("memory of a device", ""),
            ("  parameters", text_of_bytes(memory.parameters)),
            ("  optimizer", text_of_bytes(memory.optimizer)),
            ("  other arguments", text_of_bytes(memory.others)),
            ("  outputs", text_of_bytes(memory.outputs)),
            ("  temporaries", text_of_bytes(memory.temporaries)),
            ("  total", text_of_bytes(memory.total)),
        ]
        if self.costs is None:
            rows[4] = ("  outputs", "part of temporaries")
        if memory.constants:
            rows.insert(4, ("  constants", text_of_bytes(memory.constants)))
        if memory.limit is not None:
            rest = abs(memory.limit - memory.total)
            words = "fits, left" if memory.fits else "does not fit, too much by"
            rows.append((f"  {words}", text_of_bytes(rest)))
        return rows

    def _time_rows(self) -> Rows:
        amounts = {
            "compute": (self.flops, "flop"),
            "memory": (self.bytes, "B"),
            "network": (self.sent, "B"),
        }
        times = self.costs.times if self.costs is not None else {}
        rows = [("a step of a device", "", "at its peak")]
        for name, (amount, unit) in amounts.items():
            text = "unknown" if amount is None else text_of_count(amount) + unit
            if name == "compute" and amount and self._is_more_unknown():
                text += " and more"
            seconds = text_of_seconds(times.get(name))
            mark = "  <" * (name == self.bottleneck)
            rows.append((f"  {name}", text, seconds + mark))
        if self.bound is not None:
            rows.append(("  at least", "", text_of_seconds(self.bound)))
        return rows

    def _traffic_rows(self) -> Rows:
        if self.costs is None or not self.costs.traffic:
            return []
        rows = [("sent by a device", "along", "arrays", "bytes")]
        for (kind, axes), traffic in sorted(self.costs.traffic.items()):
            sent, along = text_of_bytes(traffic.sent), ", ".join(axes) or "-"
            rows.append((f"  {kind}", along, f"{traffic.count:,}", sent))
        return rows

    def _undivided_rows(self) -> Rows:
        if not self.undivided:
            return []
        rows = [("on every device whole", "", "", "")]
        for row in self.undivided[:_NUM_UNDIVIDED]:
            form = descriptions.describe_form(row.dtype, row.shape)
            size = text_of_bytes(row.num_bytes)
            rows.append((f"  {row.path}", form, size, _why_whole(row)))
        rest = self.undivided[_NUM_UNDIVIDED:]
        if rest:
            size = text_of_bytes(sum([row.num_bytes for row in rest]))
            rows.append((f"  and {len(rest)} more", "", size, ""))
        return rows

    def _activation_rows(self) -> Rows:
        activations = self.activations or ()
        whole = [row for row in activations if row.way_out is not None]
        rows = [("made on every device whole", "", "", "", "")]
        for row in whole[:_NUM_UNDIVIDED]:
            form = descriptions.describe_form(row.dtype, row.shape)
            size = text_of_bytes(row.num_bytes) + f", {row.count} x" * (row.count > 1)
            way_out = "{} could divide axis {}".format(*row.way_out or ())
            rows.append((f"  {row.path or '-'}", row.operation, form, size, way_out))
        if len(whole) > _NUM_UNDIVIDED:
            rows.append((f"  and {len(whole) - _NUM_UNDIVIDED} more", "", "", "", ""))
        others = [row.num_bytes for row in activations if row.way_out is None]
        if others:
            size = f"up to {text_of_bytes(max(others))}"
            rows.append((f"  unknown of {len(others)} others", "", "", size, ""))
        return rows if activations else []

    def _unknown_rows(self) -> Rows:
        if self.costs is None:
            return [("the rest is unknown: the compiler refuses what doesn't fit",)]
        rows = [
            (f"  {name}", f"{count:,} calls")
            for name, count in self.costs.unknown.items()
        ]
        if self.costs.unknown_loops:
            loops = f"{self.costs.unknown_loops:,}, as one turn each"
            rows.append(("  loops of unknown length", loops))
        return [("not counted", ""), *rows] if rows else []

    def as_json(self) -> str:
        """Writes everything as JSON.

        Example:
            >>> import json
            >>> x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
            >>> target = nnx.forecast.target("cpu")
            >>> text = nnx.forecast.step(lambda x: x @ x, x, target=target).as_json()
            >>> json.loads(text)["flops"]
            1024
        """
        content = {
            "target": self.target.name,
            "mesh": dict(self.mesh),
            "memory": {**dataclasses.asdict(self.memory), "total": self.memory.total},
            "flops": self.flops,
            "bytes": self.bytes,
            "sent": self.sent,
            "costs": _described(self.costs),
            "undivided": {row.path: row.num_bytes for row in self.undivided},
            "activations": None
            if self.activations is None
            else [dataclasses.asdict(row) for row in self.activations],
            "seconds": self.seconds,
        }
        return json.dumps(content, indent=1)

    def draw(self, path: Any = None) -> Any:
        """Draws the memory against its limit, and the modules under their roofline.

        Args:
            path: Where to save it as an image; ``None`` saves nothing.

        Returns:
            The figure; needs ``matplotlib``.

        References:
            Williams, Waterman and Patterson, 2009, "Roofline: an insightful visual
            performance model for multicore architectures".

        Example:
            >>> x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
            >>> target = nnx.forecast.target("cpu")
            >>> figure = nnx.forecast.step(lambda x: x @ x, x, target=target).draw()
            >>> [axes.get_title() for axes in figure.axes]
            ['memory of a device', 'roofline']
        """
        return pictures.draw({self._title(): self}, path)


SUMMARY = (
    *("memory", "fits", "estimate", "because of"),
    *("at least", "flop", "bytes", "sent"),
)


def summary(forecast: Forecast) -> tuple[str, ...]:
    """Writes a forecast in one row; `SUMMARY` names its columns."""
    memory = forecast.memory
    fits = "unknown"
    if memory.limit is not None:
        rest = text_of_bytes(abs(memory.limit - memory.total))
        fits = f"yes, {rest} left" if memory.fits else f"no, {rest} too much"
    amounts = forecast.flops, forecast.bytes, forecast.sent
    return (
        *(text_of_bytes(memory.total), fits, text_of_seconds(forecast.estimate)),
        *(forecast.bottleneck, text_of_seconds(forecast.bound)),
        *map(text_of_count, amounts),
    )


def _described(costs: Costs | None) -> Any:
    if costs is None:
        return None
    modules = [
        {**scope._asdict(), "path": ".".join(scope.path), **dataclasses.asdict(work)}
        for scope, work in costs.modules.items()
    ]
    traffic = [
        {"kind": kind, "axes": axes, **dataclasses.asdict(traffic)}
        for (kind, axes), traffic in costs.traffic.items()
    ]
    return {
        **{"modules": modules, "traffic": traffic, "times": dict(costs.times)},
        **{"unknown": dict(costs.unknown), "unknown_loops": costs.unknown_loops},
    }


def _why_whole(row: PlacedArray) -> str:
    """Says why an array isn't divided: its annotation has no axis of the mesh."""
    spec = tuple(row.spec or ())
    return "axes of size 1" if any(spec) else "no axis of the mesh"


def html_table(rows: Rows) -> str:
    """Writes rows, of which the first is the head, as a table of HTML."""
    head, *body = [[html.escape(cell.strip()) for cell in row] for row in rows]
    lines = "".join(f"<tr><td>{'</td><td>'.join(row)}</td></tr>" for row in body)
    return f"<table><tr><th>{'</th><th>'.join(head)}</th></tr>{lines}</table>"


def text_of_count(count: float | None) -> str:
    """Writes a number with a prefix of the SI and a space before the unit."""
    if not count:
        return "unknown" if count is None else "0 "
    for prefix in ("", "k", "M", "G", "T"):
        if abs(count) < 1000:
            return f"{count:.4g} {prefix}"
        count /= 1000
    return f"{count:.4g} P"


def text_of_bytes(count: float) -> str:
    """Writes a number of bytes."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:,.4g} GiB"


def text_of_seconds(seconds: float | None) -> str:
    """Writes a time."""
    if seconds is None:
        return "unknown"
    if seconds >= 1:
        return f"{seconds:.3f} s"
    return f"{seconds * 1e3:.3f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"
