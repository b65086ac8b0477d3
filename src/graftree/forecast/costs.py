"""Costs of an instruction: operations of the matrix units, bytes of memory.

Operations are those of products and convolutions, two for each multiplication with its
addition; padding and the gaps of dilated convolutions don't count. Bytes are what an
instruction reads and writes if nothing stays in a scratchpad: of a slice the slice, of
an update in place the update.
"""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from graftree.forecast import scopes, traffic
from graftree.forecast.forecasts import Costs, Work
from graftree.forecast.hlo import (
    CALLERS,
    SAME_VALUES,
    ArrayType,
    Computation,
    Instruction,
    Program,
    is_continued,
    parameters,
    source,
    total,
    users,
)
from graftree.forecast.scopes import Scope
from graftree.forecast.targets import Target
from graftree.forecast.traffic import Traffic

# They make no array of their own, or count where they begin.
_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all",
    "partition-id", "replica-id", "opt-barrier", "add-dependency", "domain",
    "get-dimension-size", "iota", "call-update",
}  # fmt: skip
# Custom calls without products: layouts, sorting, random bits, partitioning.
_NO_PRODUCTS = (
    *("Sharding", "SPMD", "xla.sdy", "LayoutConstraint", "AllocateBuffer", "Assume"),
    *("X64", "TopK", "PartialReduce", "annotate_device_placement", "MoveTo", "Pin"),
    *("AssumeGather", "AsyncCollective", "ConcatBitcast", "GatherScatter"),
    *("cu_threefry2x32", "__cub$", "Resize", "Pad", "Slice", "Debug"),
)
_SLICES = ("dynamic-slice", "slice", "gather")


class Flops(NamedTuple):
    """Operations of one product.

    Attributes:
        instruction: The product or convolution.
        count: Number of operations; ``None`` if they aren't known.
        bits: The width of the wider factor.
    """

    instruction: Instruction
    count: int | None
    bits: int


def products(
    program: Program, computation: Computation, instruction: Instruction
) -> Iterator[Flops]:
    """Lists the products in an instruction, even in a fused one."""
    if instruction.opcode == "fusion":
        fused = program.fused(instruction)
        for inner in fused.values():
            yield from products(program, fused, inner)
        return
    count_of = _COUNTS.get(instruction.opcode)
    if instruction.opcode == "custom-call":
        count_of = _custom_count(instruction)
    if count_of is None:
        return
    factors = [computation[name].arrays[0] for name in instruction.operands[:2]]
    bits = max([x.bits for x in factors], default=0)
    yield Flops(instruction, count_of(instruction, *factors), bits)


def _count_dot(instruction: Instruction, a: ArrayType, _: ArrayType) -> int:
    contracted = [a.shape[i] for i in instruction.integers("lhs_contracting_dims")]
    return 2 * instruction.arrays[0].size * math.prod(contracted)


def _count_convolution(instruction: Instruction, a: ArrayType, b: ArrayType) -> int:
    """Counts a convolution, or the gradient of one that cuDNN computes."""
    result = instruction.arrays[0]
    if "BackwardFilter" in instruction.target:
        return _convolution(instruction, a, result, b)
    if "BackwardInput" in instruction.target:
        return _convolution(instruction, result, b, a)
    return _convolution(instruction, a, b, result)


def _convolution(
    instruction: Instruction, a: ArrayType, kernel: ArrayType, out: ArrayType
) -> int:
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    if labels is None:
        raise ValueError(f"a convolution without dim_labels: {instruction.name}")
    of_a, of_kernel, of_out = labels.groups()
    count = 2 * kernel.shape[of_kernel.index("i")]
    count *= out.shape[of_out.index("b")] * out.shape[of_out.index("f")]
    for axis, window in enumerate(_windows(instruction, len(of_a) - 2)):
        letter = str(axis)
        count *= window.pairs(
            a.shape[of_a.index(letter)],
            kernel.shape[of_kernel.index(letter)],
            out.shape[of_out.index(letter)],
        )
    return count


class _Window(NamedTuple):
    """How a kernel moves along one axis."""

    stride: int = 1
    padding: int = 0
    dilation: int = 1  # of the input
    kernel_dilation: int = 1

    def pairs(self, size: int, kernel_size: int, out_size: int) -> int:
        """Counts pairs of an output and a kernel position that read an input."""
        starts = np.arange(out_size)[:, None] * self.stride - self.padding
        positions = starts + np.arange(kernel_size) * self.kernel_dilation
        is_inside = (positions >= 0) & (positions <= (size - 1) * self.dilation)
        return int(np.sum(is_inside & (positions % self.dilation == 0)))


def _windows(instruction: Instruction, rank: int) -> list[_Window]:
    match = re.search(r"window=\{([^}]*)\}", instruction.attributes)
    fields = dict(x.split("=") for x in match[1].split()) if match else {}

    def values(name: str, default: str) -> list[int]:
        texts = fields.get(name, "x".join([default] * rank)).split("x")
        return [int(text.split("_")[0]) for text in texts]

    settings = ("stride", "1"), ("pad", "0"), ("lhs_dilate", "1"), ("rhs_dilate", "1")
    columns = [values(name, default) if rank else [] for name, default in settings]
    return [_Window(*row) for row in zip(*columns, strict=True)]


_COUNTS: dict[str, Callable[[Instruction, ArrayType, ArrayType], int | None]] = {
    "dot": _count_dot,
    "convolution": _count_convolution,
}


def _custom_count(instruction: Instruction) -> Callable[..., int | None] | None:
    """Returns how to count a call of a library's function, if it may be a product."""
    target = instruction.target
    if "gemm" in target or "matmul" in target:
        return _count_gemm
    if "dim_labels=" in instruction.attributes:
        return _count_convolution
    is_known = target.startswith(_NO_PRODUCTS)
    return None if is_known else lambda *_: None


def _count_gemm(instruction: Instruction, a: ArrayType, b: ArrayType) -> int | None:
    match = re.search(
        r'"lhs_contracting_dimensions":\[([\d",]*)\]', instruction.attributes
    )
    if match:
        contracted = [a.shape[int(i)] for i in re.findall(r"\d+", match[1])]
    elif instruction.target.startswith("__onednn$matmul"):
        transposed = '"transpose_a":true' in instruction.attributes
        contracted = [a.shape[-2 if transposed else -1]]
    else:
        return None
    return 2 * instruction.arrays[0].size * math.prod(contracted)


def num_bytes(
    program: Program, computation: Computation, instruction: Instruction
) -> int:
    """Counts the bytes of memory that an instruction reads and writes."""
    opcode = instruction.opcode
    if opcode in _FREE or opcode in CALLERS or opcode.endswith("-done"):
        return 0
    written = total(_outputs(instruction))
    if opcode == "fusion":
        return _fusion_bytes(program, computation, instruction)
    if opcode in _SLICES:
        return 2 * written
    operands = [total(computation[name].arrays) for name in instruction.operands]
    if opcode == "dynamic-update-slice":
        return 2 * operands[1]
    if opcode == "scatter":
        return sum(operands[1:]) + operands[-1]
    return written + sum(operands)


def _outputs(instruction: Instruction) -> list[ArrayType]:
    """Arrays that an instruction makes; the start of a copy names its operand too."""
    if instruction.opcode == "copy-start":
        return instruction.arrays[:1]
    if instruction.opcode.endswith("-start"):
        return instruction.arrays[len(instruction.operands) :] or instruction.arrays
    return instruction.arrays


def _fusion_bytes(
    program: Program, computation: Computation, instruction: Instruction
) -> int:
    fused = program.fused(instruction)
    count, updated = 0, []
    for result in program.results(instruction):
        origin = source(fused, result.name)
        if origin.opcode == "dynamic-update-slice":
            updated.append(origin)
            count += fused[origin.operands[1]].arrays[0].num_bytes
        elif result.opcode != "parameter" and not is_continued(fused, result):
            count += total(result.arrays)
    for parameter, name in zip(parameters(fused), instruction.operands, strict=True):
        array = computation[name].arrays
        count += min(total(array), _read(fused, parameter, updated))
    return count


def _read(fused: Computation, value: Instruction, updates: list[Instruction]) -> int:
    """Counts the bytes that a fusion reads of a value: where it slices it, a slice."""
    count = 0
    for user in users(fused, value.name):
        if user.opcode in _SLICES and user.operands[0] == value.name:
            count += user.arrays[0].num_bytes
        elif user in updates and user.operands[0] == value.name:
            continue
        elif user.opcode == "tuple" or is_continued(fused, user):
            continue  # it is only passed on
        elif user.opcode in SAME_VALUES and not user.is_root:
            count += _read(fused, user, updates)
        else:
            return sum([array.num_bytes for array in value.arrays])
    return count


def largest(instruction: Instruction) -> int:
    """Returns the bytes of the largest array that an instruction makes."""
    if instruction.opcode in _FREE or instruction.opcode in CALLERS:
        return 0
    return max([x.num_bytes for x in instruction.arrays if x.is_in_memory], default=0)


def is_kernel(instruction: Instruction) -> bool:
    """Whether an instruction does something on the device when it is its turn."""
    opcode = instruction.opcode
    return not (opcode in _FREE or opcode in CALLERS or opcode.endswith("-done"))


# ----------------------------------------------------------------------- sums


def costs_of(program: Program, target: Target, mesh: Any) -> Costs:
    """Adds up what one device does in a program.

    Args:
        program: The program.
        target: What it is compiled for.
        mesh: Its devices; ``None`` for one.
    """
    sums = _CostSums(program, target, mesh)
    for computation, count in program.runs():
        sums.add(computation, count)
    return Costs(
        modules={scope: work for scope, work in sums.modules.items() if work},
        traffic=dict(sums.traffic),
        times=sums.times(),
        unknown=dict(sums.unknown),
        unknown_loops=program.unknown_loops,
    )


class _CostSums:
    """Sums over the computations of a program; the arguments are those of `costs_of`.

    Attributes:
        modules: The work of each scope.
        traffic: What is sent, by kind of collective and axes.
        unknown: Calls of functions whose operations can't be counted.
        seconds: Time of all products at the peak of the matrix units.
        sent: What is sent, and how often.
    """

    def __init__(self, program: Program, target: Target, mesh: Any) -> None:
        self.program, self.accelerator = program, target.accelerator
        self.sizes: Mapping[str, int] = {} if mesh is None else dict(mesh.shape)
        devices = target.devices[:1] if mesh is None else [*mesh.devices.flat]
        self.hosts = np.array([target.host(device) for device in devices])
        self.modules = collections.defaultdict[Scope, Work](Work)
        self.traffic = collections.defaultdict[Any, Traffic](Traffic)
        self.unknown = collections.Counter[str]()
        self.seconds = 0.0
        self.sent: list[tuple[traffic.Sent, int]] = []

    def add(self, computation: Computation, count: int) -> None:
        """Adds what a computation does in so many runs."""
        scope_by_name = scopes.scopes_of(computation)
        for name, instruction in computation.items():
            work = self.modules[scope_by_name[name]]
            work.bytes += count * num_bytes(self.program, computation, instruction)
            work.largest = max(work.largest, largest(instruction))
            self._add_products(computation, instruction, scope_by_name[name], count)
        for item in traffic.exchanges(self.program, computation):
            scope = scopes.scope_of(item.instruction.op_name)
            scope = scope_by_name.get(item.instruction.name, scope)
            self.modules[scope].sent += count * item.sent
            axes = item.axes(self.sizes) if self.sizes else ()
            traffic_of_kind = self.traffic[item.kind, axes]
            traffic_of_kind.add(count, count * item.num_bytes, count * item.sent)
            self.sent.append((item, count))

    def _add_products(
        self, computation: Computation, instruction: Instruction, scope: Scope, n: int
    ) -> None:
        for product in products(self.program, computation, instruction):
            if product.count is None:
                self.unknown[product.instruction.target] += n
                continue
            own_scope = scopes.scope_of(product.instruction.op_name)
            self.modules[own_scope if own_scope.path else scope].flops += (
                n * product.count
            )
            if self.accelerator is not None:
                self.seconds += n * product.count / self.accelerator.peak(product.bits)

    def times(self) -> dict[str, float]:
        """Returns the seconds of each resource at its peak; none without figures."""
        accelerator = self.accelerator
        if accelerator is None:
            return {}
        num_bytes = sum([work.bytes for work in self.modules.values()])
        links = accelerator.link, accelerator.host_link
        is_unknown = bool(self.unknown) and not self.seconds
        return {
            **({} if is_unknown else {"compute": self.seconds}),
            "memory": num_bytes / accelerator.memory_bandwidth,
            "network": traffic.seconds(self.sent, self.hosts, *links),
        }
