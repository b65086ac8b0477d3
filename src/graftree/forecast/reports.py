"""What a step costs: in total, by module, by collective; as text and as JSON."""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence

from graftree.core.text import descriptions
from graftree.forecast.scopes import Scope
from graftree.forecast.targets import Target
from graftree.sharding.placement import PlacedArray

_COLUMNS = ("flops", "bytes", "sent", "largest")


@dataclasses.dataclass
class Work:
    """What is done in one module, on one device.

    Attributes:
        flops: Operations of products and convolutions.
        bytes: Bytes read from and written to the device's memory.
        sent: Bytes sent to other devices.
        largest: Bytes of the largest array that is made.
    """

    flops: int = 0
    bytes: int = 0
    sent: float = 0.0
    largest: int = 0

    def __iter__(self) -> Iterator[float]:
        return iter([getattr(self, name) for name in _COLUMNS])

    def add(self, other: Work) -> None:
        """Adds what is done in another module."""
        self.flops += other.flops
        self.bytes += other.bytes
        self.sent += other.sent
        self.largest = max(self.largest, other.largest)


@dataclasses.dataclass
class Traffic:
    """What a device exchanges by one kind of collective along some axes of the mesh.

    Attributes:
        count: Number of arrays.
        bytes: Bytes of the arrays, each where it is largest.
        sent: Bytes that a device sends for them.
    """

    count: int = 0
    bytes: int = 0
    sent: float = 0.0

    def add(self, count: int, num_bytes: int, sent: float) -> None:
        """Adds arrays."""
        self.count += count
        self.bytes += num_bytes
        self.sent += sent


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes that a device holds at once.

    Attributes:
        parameters: Of the Params in the arguments.
        optimizer: Of the state of optimizers.
        others: Of the other arguments.
        outputs: Of results that don't take the place of arguments.
        temporaries: Of what the step makes for itself, at its peak.
        limit: The memory of the device; ``None`` for a CPU.
    """

    parameters: int
    optimizer: int
    others: int
    outputs: int
    temporaries: int
    limit: float | None

    @property
    def arguments(self) -> int:
        """Bytes of all arguments."""
        return self.parameters + self.optimizer + self.others

    @property
    def total(self) -> int:
        """Bytes of all together."""
        return self.arguments + self.outputs + self.temporaries

    @property
    def fits(self) -> bool:
        """Whether the memory is enough; always on a CPU."""
        return self.limit is None or self.total <= self.limit


@dataclasses.dataclass(frozen=True, repr=False)
class Forecast:
    """What a step costs on a target, for each device; prints as a table.

    Attributes:
        target: What it was compiled for.
        mesh: The size of each axis of the mesh; empty for one device.
        memory: What a device holds.
        modules: The `Work` of each `Scope`: a path in the arguments of the function,
            forward or backward. What has no path is at the empty one.
        traffic: The `Traffic` of each kind of collective and tuple of axes.
        bounds: Seconds that a step takes at least to compute, to read and write
            memory, to send; empty for a CPU, of which no figures are public.
        undivided: Arrays in the arguments that each device holds whole.
        unknown: Functions of libraries whose operations aren't counted, and how often
            they are called.
        unknown_loops: How many loops of unknown length count as one turn.
        seconds: How long tracing and compiling took.
    """

    target: Target
    mesh: Mapping[str, int]
    memory: Memory
    modules: Mapping[Scope, Work]
    traffic: Mapping[tuple[str, tuple[str, ...]], Traffic]
    bounds: Mapping[str, float]
    undivided: Sequence[PlacedArray]
    unknown: Mapping[str, int]
    unknown_loops: int
    seconds: tuple[float, float]

    @property
    def flops(self) -> int:
        """Operations of products and convolutions."""
        return sum([work.flops for work in self.modules.values()])

    @property
    def bytes(self) -> int:
        """Bytes read from and written to memory."""
        return sum([work.bytes for work in self.modules.values()])

    @property
    def sent(self) -> float:
        """Bytes sent to other devices."""
        return sum([work.sent for work in self.modules.values()])

    @property
    def bound(self) -> float | None:
        """Seconds that a step takes at least; ``None`` for a CPU."""
        return max(self.bounds.values(), default=None)

    def rate(self, count: float) -> float | None:
        """Returns how many of something in a step a device can't exceed in a second.

        Args:
            count: Number of samples or tokens in a step, on all devices.
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
        """
        if sort not in (None, *_COLUMNS):
            raise ValueError(
                f"Forecast.by_module can't sort by {sort!r}: it knows "
                f"{', '.join(_COLUMNS)}."
            )
        rows = collections.defaultdict[Scope, Work](Work)
        for scope, work in self.modules.items():
            rows[scope._replace(path=scope.path[:depth])].add(work)
        pairs = [*rows.items()]
        if sort is not None:
            pairs.sort(key=lambda pair: -getattr(pair[1], sort))
        return pairs

    def table(self, depth: int | None = 3, sort: str | None = None) -> str:
        """Writes the work by module, as a table; the arguments are `by_module`'s."""
        cells = [
            (".".join(scope.path) or "-", "backward" if scope.is_backward else "forward",
             *map(_quantity, work))
            for scope, work in self.by_module(depth, sort)
        ]  # fmt: skip
        head = ("module", "pass", "flop", "bytes", "sent", "largest array")
        total = (_quantity(self.flops), _quantity(self.bytes), _quantity(self.sent), "")
        rows = [head, *descriptions.folded_rows(cells), ("total", "", *total)]
        return "\n".join(descriptions.aligned(rows))

    def __str__(self) -> str:
        lines = [self._title(), "", *self._memory_lines(), "", *self._time_lines()]
        if self.traffic:
            lines += ["", *self._traffic_lines()]
        if self.undivided:
            lines += ["", *self._undivided_lines()]
        lines += [
            f"not counted: {n} calls of {name}" for name, n in self.unknown.items()
        ]
        if self.unknown_loops:
            lines.append(
                f"{self.unknown_loops} loops of unknown length, as one turn each"
            )
        return "\n".join(lines)

    __repr__ = __str__

    def _title(self) -> str:
        count = len(self.target.devices)
        axes = ", ".join(f"{name}={size}" for name, size in self.mesh.items())
        devices = f"{count} device" + "s" * (count > 1)
        return f"{self.target.name}: {devices}" + (f", {axes}" if axes else "")

    def _memory_lines(self) -> list[str]:
        memory = self.memory
        rows = [
            ("memory of a device", ""),
            ("  parameters", _bytes(memory.parameters)),
            ("  optimizer", _bytes(memory.optimizer)),
            ("  other arguments", _bytes(memory.others)),
            ("  outputs", _bytes(memory.outputs)),
            ("  temporaries", _bytes(memory.temporaries)),
            ("  total", _bytes(memory.total)),
        ]
        if memory.limit is not None:
            rest = memory.limit - memory.total
            words = "fits, left" if memory.fits else "does not fit, too much by"
            rows.append((f"  {words}", _bytes(abs(rest))))
        return descriptions.aligned(rows)

    def _time_lines(self) -> list[str]:
        amounts = {
            "compute": f"{_quantity(self.flops)}flop",
            "memory": f"{_quantity(self.bytes)}B",
            "network": f"{_quantity(self.sent)}B",
        }
        rows = [("a step of a device", "", "at least")]
        for name, amount in amounts.items():
            seconds = _seconds(self.bounds[name]) if self.bounds else "unknown"
            slowest = bool(self.bounds) and self.bounds[name] == self.bound
            rows.append((f"  {name}", amount, seconds + "  <" * slowest))
        return descriptions.aligned(rows)

    def _traffic_lines(self) -> list[str]:
        rows = [("sent by a device", "along", "arrays", "bytes")]
        for (kind, axes), traffic in sorted(self.traffic.items()):
            along = ", ".join(axes) or "-"
            rows.append(
                (f"  {kind}", along, f"{traffic.count:,}", _bytes(traffic.sent))
            )
        return descriptions.aligned(rows)

    def _undivided_lines(self) -> list[str]:
        rows = [("on every device whole", "", "", "")]
        rows += [
            (f"  {row.path}", descriptions.describe_form(row.dtype, row.shape),
             _bytes(row.num_bytes), "replicated")
            for row in self.undivided[:_MOST]
        ]  # fmt: skip
        rest = self.undivided[_MOST:]
        if rest:
            size = sum([row.num_bytes for row in rest])
            rows.append((f"  and {len(rest)} more", "", _bytes(size), ""))
        return descriptions.aligned(rows)

    def as_json(self) -> str:
        """Writes everything as JSON."""
        content = {
            "target": self.target.name,
            "mesh": dict(self.mesh),
            "memory": {**dataclasses.asdict(self.memory), "total": self.memory.total},
            "bounds": dict(self.bounds),
            "flops": self.flops,
            "bytes": self.bytes,
            "sent": self.sent,
            "modules": [
                {"path": ".".join(scope.path), "is_backward": scope.is_backward,
                 **dataclasses.asdict(work)}
                for scope, work in self.modules.items()
            ],
            "traffic": [
                {"kind": kind, "axes": axes, **dataclasses.asdict(traffic)}
                for (kind, axes), traffic in self.traffic.items()
            ],
            "undivided": {row.path: row.num_bytes for row in self.undivided},
            "unknown": dict(self.unknown),
            "unknown_loops": self.unknown_loops,
            "seconds": self.seconds,
        }  # fmt: skip
        return json.dumps(content, indent=1)


_MOST = 5  # arrays that the text lists


def _quantity(count: float) -> str:
    """Writes a number with a prefix of the SI."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if abs(count) < 1000 or prefix == "P":
            return f"{count:.4g} {prefix}" if count else "0 "
        count /= 1000
    raise AssertionError


def _bytes(count: float) -> str:
    """Writes a number of bytes."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:,.4g} {unit}"
        count /= 1024
    raise AssertionError


def _seconds(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.3f} s"
    return f"{seconds * 1e3:.3f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"
