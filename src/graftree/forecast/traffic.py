"""What a device sends to others: by kind of collective, along axes of the mesh.

Each collective is counted as its best known algorithm sends it, in rings: of ``s``
bytes among ``n`` devices a gather or a scatter sends ``s (n - 1) / n``, a reduction of
which all get the result twice as much (Thakur et al., 2005, "Optimization of Collective
Communication Operations in MPICH").

A reduce-scatter is spelled in three ways: as that instruction; on TPUs as a fusion
called ``all-reduce-scatter``; on the CPU, whose compiler has no pass that joins the
two, as an all-reduce of which each device keeps its slice. The last is counted by
itself: more is sent.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from graftree.forecast.hlo import (
    SAME_VALUES,
    ArrayType,
    Computation,
    Instruction,
    Program,
    is_continued,
    parameters,
    users,
)

KINDS = (
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
SLICED = "all-reduce + slice"


@dataclasses.dataclass
class Traffic:
    """What a device exchanges by one kind of collective along some axes of the mesh.

    Attributes:
        count: Number of arrays.
        bytes: Bytes of the arrays, each where it is largest.
        sent: Bytes that a device sends for them.

    Example:
        >>> traffic = nnx.forecast.Traffic()
        >>> traffic.add(2, 1024, 768.0)
        >>> traffic
        Traffic(count=2, bytes=1024, sent=768.0)
    """

    count: int = 0
    bytes: int = 0
    sent: float = 0.0

    def add(self, count: int, num_bytes: int, sent: float) -> None:
        """Adds arrays."""
        self.count += count
        self.bytes += num_bytes
        self.sent += sent


class Sent(NamedTuple):
    """One array that devices exchange.

    Attributes:
        instruction: The collective, or the fusion that it is in, if that has its name.
        kind: One of `KINDS`, or `SLICED`.
        num_bytes: Of the array on one device where it is largest: after it was
            gathered, before it was scattered.
        groups: The devices that exchange it, in groups, by their positions in the
            mesh; of a permutation the pairs.
    """

    instruction: Instruction
    kind: str
    num_bytes: int
    groups: np.ndarray

    @property
    def group_size(self) -> int:
        """Number of devices of a group."""
        return self.groups.shape[1]

    @property
    def sent(self) -> float:
        """Bytes that each device sends."""
        if self.kind.startswith("collective"):
            return float(self.num_bytes)
        share = (self.group_size - 1) / self.group_size
        is_twice = self.kind in ("all-reduce", SLICED)
        return self.num_bytes * share * (1 + is_twice)

    def axes(self, mesh: Mapping[str, int]) -> tuple[str, ...]:
        """Returns the axes of a mesh along which the devices of a group differ."""
        positions = np.unravel_index(self.groups, tuple(mesh.values()))
        return tuple(
            name
            for name, along in zip(mesh, positions, strict=True)
            if np.any(along != along[:, :1])
        )

    def sent_between(self, hosts: np.ndarray) -> float:
        """Returns the part of `sent` that must leave a host.

        Each host gets what it lacks once, and its devices in the group share it.
        """
        of_groups = np.sort(hosts[self.groups], axis=1)
        num_hosts = 1 + int(np.max(np.sum(np.diff(of_groups, axis=1) > 0, axis=1)))
        if num_hosts == 1 or self.kind.startswith("collective"):
            return self.sent if num_hosts > 1 else 0.0
        return self.sent * (num_hosts - 1) / (self.group_size - 1)


def collectives(compiled: Any) -> dict[str, Traffic]:
    """Counts what the devices send each other in one run of a compiled program.

    Args:
        compiled: A function that is compiled, for devices that are there or not; or its
            text.

    Returns:
        The `Traffic` of each kind of collective. An instruction in a loop counts as
        often as the loop turns, if XLA knows (for a scan it does); else once.

    Raises:
        ValueError: If the text isn't that of a compiled program.

    Example:
        >>> mesh = nnx.forecast.target("cpu:4").mesh({"data": 4})
        >>> sharding = jax.NamedSharding(mesh, jax.P("data"))
        >>> x = jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=sharding)
        >>> compiled = jax.jit(lambda x: x.sum(0)).lower(x).compile()
        >>> nnx.forecast.collectives(compiled)
        {'all-reduce': Traffic(count=1, bytes=64, sent=96.0)}
    """
    program = Program(compiled if isinstance(compiled, str) else compiled.as_text())
    totals: dict[str, Traffic] = {}
    for computation, count in program.runs():
        for x in exchanges(program, computation):
            traffic = totals.setdefault(x.kind, Traffic())
            traffic.add(count, count * x.num_bytes, count * x.sent)
    return {kind: totals[kind] for kind in (*KINDS, SLICED) if kind in totals}


def exchanges(program: Program, computation: Computation) -> Iterator[Sent]:
    """Lists the arrays that instructions of a computation exchange, once each."""
    for instruction in computation.values():
        if instruction.opcode == "fusion":
            yield from _fused(program, instruction)
            continue
        # Of an asynchronous one, the end: the type of its start has its operands too.
        kind = instruction.opcode.removesuffix("-done")
        if kind not in KINDS:
            continue
        start = instruction
        if instruction.opcode != kind:
            start = computation[instruction.operands[0]]
        groups = _groups(start.attributes, program.num_devices)
        for index, array in enumerate(
            _exchanged(kind, computation, start, instruction)
        ):
            is_sliced = kind == "all-reduce" and _is_result_sliced(
                program, computation, instruction, index
            )
            yield Sent(start, SLICED if is_sliced else kind, array.num_bytes, groups)


def _fused(program: Program, instruction: Instruction) -> Iterator[Sent]:
    """Lists the collectives in a fusion: of an all-reduce only a slice may come out."""
    is_scatter = instruction.called[0].startswith("all-reduce-scatter")
    fused = program.fused(instruction)
    for sent in exchanges(program, fused):
        if is_continued(fused, sent.instruction):
            continue
        if not sent.instruction.op_name:
            sent = sent._replace(instruction=instruction)
        yield sent._replace(kind="reduce-scatter") if is_scatter else sent


def _exchanged(
    kind: str, computation: Computation, start: Instruction, end: Instruction
) -> list[ArrayType]:
    """Lists the arrays of a collective where they are largest."""
    if kind == "reduce-scatter":
        return [x for name in start.operands for x in computation[name].arrays]
    if kind == "all-to-all" and len(end.arrays) > 1:  # the parts of one array
        first = end.arrays[0]
        return [first._replace(shape=(len(end.arrays), *first.shape))]
    return end.arrays


def _groups(attributes: str, num_devices: int) -> np.ndarray:
    """Reads the groups of a collective, ``[groups, size]``; or the pairs."""
    everyone = np.arange(num_devices)[None]
    if pairs := re.search(r"source_target_pairs=\{(.*?)\}\}", attributes):
        return _integers(pairs[1]).reshape(-1, 2)
    if iota := re.search(
        r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes
    ):
        shape, sizes = _integers(iota[1]), _integers(iota[2])
        devices = np.arange(math.prod(sizes)).reshape(sizes)
        if iota[3]:
            devices = devices.transpose(_integers(iota[3]))
        return devices.reshape(shape)
    if axes := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", attributes):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", axes[1]))
        along = [[*sizes].index(name) for name in re.findall(r"'(\w+)'", axes[2])]
        devices = np.arange(num_devices).reshape([*map(int, sizes.values())])
        devices = np.moveaxis(devices, along, range(-len(along), 0))
        return devices.reshape(-1, math.prod(devices.shape[-len(along) :]))
    match = re.search(r"replica_groups=\{(\{.*?\})\}", attributes)
    if match is None and re.search(r"replica_groups=(?!\{\})", attributes):
        raise ValueError(f"nnx.forecast can't read the groups in {attributes[:200]!r}")
    if match is None:
        return everyone
    return np.array(
        [_integers(group) for group in re.findall(r"\{([\d,]+)\}", match[1])]
    )


def _integers(text: str) -> np.ndarray:
    return np.array(re.findall(r"\d+", text), int)


def _is_result_sliced(
    program: Program, computation: Computation, instruction: Instruction, index: int
) -> bool:
    """Whether a device keeps only a slice of one of an instruction's results."""
    if not instruction.type.startswith("("):
        return _is_sliced(program, computation, instruction.name)
    results = [
        user.name
        for user in users(computation, instruction.name)
        if user.opcode == "get-tuple-element" and user.index == index
    ]
    return bool(results) and all([_is_sliced(program, computation, x) for x in results])


def _is_sliced(program: Program, computation: Computation, name: str) -> bool:
    """Whether all that is ever read of an instruction's result is a slice of it."""
    readers = users(computation, name)
    return bool(readers) and all(
        [_reads_slice(program, computation, user, name) for user in readers]
    )


def _reads_slice(
    program: Program, computation: Computation, user: Instruction, name: str
) -> bool:
    if user.opcode == "dynamic-slice":
        return user.operands[0] == name and user.operands.count(name) == 1
    if user.opcode in SAME_VALUES:
        return _is_sliced(program, computation, user.name)
    if user.opcode not in ("fusion", "call"):
        return False
    called = program.computations[user.called[0]]
    return all(
        [
            _is_sliced(program, called, parameter.name)
            for parameter, operand in zip(
                parameters(called), user.operands, strict=True
            )
            if operand == name
        ]
    )


def seconds(
    items: Sequence[tuple[Sent, int]], hosts: np.ndarray, link: float, host_link: float
) -> float:
    """Bounds from below the time in which a device sends all this, overlapped or not.

    Bytes within a host and between hosts go over different links, at once.

    Args:
        items: What is sent, and how often.
        hosts: The host of each device, by its position in the mesh.
        link: Bytes per second within a host.
        host_link: Bytes per second between hosts.
    """
    inside = between = 0.0
    for item, count in items:
        crossing = item.sent_between(hosts)
        between += count * crossing
        inside += count * (item.sent - crossing)
    return max(inside / link, between / host_link)
