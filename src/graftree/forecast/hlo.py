"""Reads the text of a compiled program: computations of instructions, and their runs.

``compiled.as_text()`` is the program of one device after XLA has divided it, so all
shapes in it are those of the parts that a device has.
"""

from __future__ import annotations

import collections
import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(
    r"^\s+(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>.+?) "
    r"(?P<opcode>[a-z][\w\-]*)\((?P<rest>.*)$"
)
_ARRAY = re.compile(r"([a-z]+\d*\w*)\[([\d,]*)\](?:\{([^}]*)\})?")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|true_computation|false_computation)=%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CONDITION = re.compile(r"condition=%?([\w.\-]+)")
_SPACE = re.compile(r"S\((\d+)\)")
SAME_VALUES = ("bitcast", "copy", "convert", "reshape", "transpose")
CALLERS = ("call", "while", "conditional", "async-start", "call-start")


class ArrayType(NamedTuple):
    """The type of an array in a program.

    Attributes:
        dtype: In XLA's spelling: ``bf16``, ``pred``.
        shape: Its sizes.
        is_in_memory: Whether it is in the device's memory, not in a scratchpad.
    """

    dtype: str
    shape: tuple[int, ...]
    is_in_memory: bool = True

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def bits(self) -> int:
        """Width of an element; 0 for a token."""
        digits = re.search(r"\d+", self.dtype)
        return 8 if self.dtype == "pred" else int(digits[0]) if digits else 0

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return -(-self.size * self.bits // 8)


class Instruction:
    """A line of a program.

    Attributes:
        name: Its name in the computation.
        type: The text of its type.
        opcode: The operation.
        is_root: Whether it is the result of its computation.
        operands: The names of the instructions that it reads.
        inside: The text in the parentheses: operands, a number, a literal.
        attributes: The text behind the operands.
    """

    def __init__(self, match: re.Match[str]) -> None:
        self.name, self.type = match["name"], match["type"]
        self.opcode, self.is_root = match["opcode"], match["root"] is not None
        inside = _in_parentheses(match["rest"])
        self.operands = re.findall(r"%([\w.\-]+)", inside)
        self.inside, self.attributes = inside, match["rest"][len(inside) :]

    @functools.cached_property
    def arrays(self) -> list[ArrayType]:
        """Types of the arrays that it returns."""
        return [
            ArrayType(
                dtype,
                tuple(int(size) for size in sizes.split(",") if size),
                (_SPACE.search(layout) or ["", "0"])[1] == "0",
            )
            for dtype, sizes, layout in _ARRAY.findall(self.type)
        ]

    @property
    def op_name(self) -> str:
        """Path of the operation of JAX that it comes from; empty if XLA gives none."""
        match = re.search(r'op_name="([^"]*)"', self.attributes)
        return match[1] if match else ""

    @property
    def target(self) -> str:
        """Name of the function that a custom call calls; empty for others."""
        match = re.search(r'custom_call_target="([^"]*)"', self.attributes)
        return match[1] if match else ""

    @property
    def called(self) -> list[str]:
        """Names of the computations that it runs; of a loop its body alone."""
        names = _CALLED.findall(self.attributes)
        for branches in _BRANCHES.findall(self.attributes):
            names += [name.strip(" %") for name in branches.split(",")]
        return names

    @property
    def index(self) -> int:
        """Which element of a tuple it takes."""
        match = re.search(r"\bindex=(\d+)", self.attributes)
        if match is None:
            raise ValueError(f"{self.name} takes no element of a tuple.")
        return int(match[1])

    def integers(self, attribute: str) -> tuple[int, ...]:
        """Returns an attribute such as ``dimensions={0,1}``; empty without it."""
        match = re.search(
            rf'\b{attribute}"?[=:][\{{\[]([\d,"]*)[\}}\]]', self.attributes
        )
        return tuple(map(int, re.findall(r"\d+", match[1]))) if match else ()


Computation = Mapping[str, Instruction]


class Run(NamedTuple):
    """A computation that runs by itself, not as part of a fused one.

    Attributes:
        computation: Its instructions.
        count: How often it runs.
    """

    computation: Computation
    count: int


class Program:
    """A compiled program.

    Args:
        text: ``compiled.as_text()``.

    Attributes:
        computations: Its functions, by name.
        num_devices: How many devices it is for.
        unknown_loops: How many loops have a length that isn't known.

    Raises:
        ValueError: If the text is that of no compiled program.
    """

    def __init__(self, text: str) -> None:
        self.computations: dict[str, dict[str, Instruction]] = {}
        entry, current = "", {}
        for line in text.splitlines():
            if match := _INSTRUCTION.match(line):
                instruction = Instruction(match)
                current[instruction.name] = instruction
            elif header := _COMPUTATION.match(line):
                current = self.computations.setdefault(header[2], {})
                entry = header[2] if header[1] else entry
        if not entry:
            raise ValueError("This is not the text of a compiled program: no ENTRY.")
        counts = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", text[:10000])
        self.num_devices = math.prod(map(int, counts))
        self.unknown_loops = 0
        self._runs: dict[str, int] = collections.Counter()
        self._visit(entry, 1)

    def _visit(self, name: str, count: int) -> None:
        self._runs[name] += count
        for instruction in self.computations[name].values():
            if instruction.opcode in CALLERS:
                trips = self._trips(name, instruction)
                self.unknown_loops += trips is None
                for called in self._taken(instruction):
                    self._visit(called, count * (1 if trips is None else trips))

    def _taken(self, caller: Instruction) -> list[str]:
        """Names what a caller runs: of a conditional the branch that makes most."""
        if caller.opcode != "conditional":
            return caller.called
        return [max(caller.called, key=self._made)]

    def _made(self, name: str) -> int:
        """Counts the bytes of all arrays that a computation and those below it make."""
        return sum(
            [
                total(x.arrays) + sum([self._made(called) for called in x.called])
                for x in self.computations[name].values()
            ]
        )

    def _trips(self, name: str, caller: Instruction) -> int | None:
        """Counts the turns of a loop; ``None`` if they aren't known, 1 for no loop."""
        if caller.opcode != "while":
            return 1
        if match := _TRIPS.search(caller.attributes):
            return int(match[1])
        # Compilers of TPUs don't say it: `while (i < end) i += step`.
        match = _CONDITION.search(caller.attributes)
        condition = self.computations[match[1]] if match else {}
        root = next((x for x in condition.values() if x.is_root), None)
        if root is None or "direction=LT" not in root.attributes:
            return None
        counter = source(condition, root.operands[0])
        body = self.computations[caller.called[0]]
        before = source(self.computations[name], caller.operands[0])
        after = next(x for x in body.values() if x.is_root)
        if counter.opcode != "get-tuple-element" or before.opcode != "tuple":
            return None
        index = counter.index
        start = source(self.computations[name], before.operands[index])
        following = source(body, after.operands[index])
        end = source(condition, root.operands[1])
        if following.opcode != "add":
            return None
        step = source(body, following.operands[1])
        if any([x.opcode != "constant" for x in (start, end, step)]):
            return None
        numbers = range(*[int(x.inside) for x in (start, end, step)])
        return len(numbers)

    def runs(self) -> Iterator[Run]:
        """Lists what runs; a loop of unknown length counts as one turn."""
        for name, count in self._runs.items():
            yield Run(self.computations[name], count)

    def fused(self, instruction: Instruction) -> Computation:
        """Returns the computation of a fusion."""
        return self.computations[instruction.called[0]]

    def results(self, instruction: Instruction) -> list[Instruction]:
        """Lists what a fusion returns: its root, or what this puts into a tuple."""
        fused = self.fused(instruction)
        (root,) = [x for x in fused.values() if x.is_root]
        is_tuple = root.opcode == "tuple"
        return [fused[name] for name in root.operands] if is_tuple else [root]


def instructions(text: str) -> Iterator[Instruction]:
    """Lists the instructions of a program, compiled or not."""
    for match in filter(None, map(_INSTRUCTION.match, text.splitlines())):
        yield Instruction(match)


def source(computation: Computation, name: str) -> Instruction:
    """Returns the instruction that makes a value, before copies of it."""
    instruction = computation[name]
    while instruction.opcode in SAME_VALUES:
        instruction = computation[instruction.operands[0]]
    return instruction


def parameters(computation: Computation) -> list[Instruction]:
    """Lists the parameters of a computation, in their order."""
    inputs = [x for x in computation.values() if x.opcode == "parameter"]
    return sorted(inputs, key=lambda x: int(x.inside))


def users(computation: Computation, name: str) -> list[Instruction]:
    """Lists the instructions that read one."""
    return [user for user in computation.values() if name in user.operands]


def is_continued(computation: Computation, instruction: Instruction) -> bool:
    """Whether an instruction goes on with a collective that another fusion started.

    Compilers of TPUs spread a collective over several fusions, so that it is sent while
    they compute: the instruction is in each of them, and passes on what it writes to.
    """
    if instruction.target == "AsyncCollectiveDone":
        return True
    readers = users(computation, instruction.name)
    is_start = any([reader.target == "AsyncCollectiveStart" for reader in readers])
    return "chain_id=" in instruction.attributes and not is_start


def total(arrays: Sequence[ArrayType]) -> int:
    """Sums the bytes of arrays in the device's memory."""
    return sum([array.num_bytes for array in arrays if array.is_in_memory])


def _in_parentheses(rest: str) -> str:
    """Takes a text up to the parenthesis that closes one before it."""
    depth = 1
    for position, letter in enumerate(rest):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if not depth:
            return rest[:position]
    return rest
