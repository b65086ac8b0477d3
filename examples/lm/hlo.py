"""What a compiled step sends between devices, and what it holds, read from its HLO.

``compiled.as_text()`` is the program of one device after XLA has divided it, so all
shapes in it are those of the parts that a device has. A reduce-scatter is spelled in
three ways: as that instruction; on TPUs as a fusion called ``all-reduce-scatter``; on
the CPU, whose compiler has no pass that joins the two, as an all-reduce of which each
device keeps its slice. The last is counted by itself: the result is that of a
reduce-scatter, but more is sent.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

KINDS = (
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)
SLICED = "all-reduce + slice"

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.+?) ([a-z][\w\-]*)\((.*)$")
_ARRAY = re.compile(r"([a-z]+\d*\w*)\[([\d,]*)\]")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|true_computation|false_computation)=%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CALLERS = ("fusion", "call", "while", "conditional", "async-start")
_SAME_VALUES = ("bitcast", "copy", "transpose", "reshape", "convert")


class Collective(NamedTuple):
    """How much of one kind of communication a program has.

    Attributes:
        count: Number of arrays, in all turns of all loops. It isn't the number of
            instructions, since XLA combines some that follow each other.
        num_bytes: Bytes of these arrays on one device, each where it is largest: after
            it was gathered, before it was scattered.
    """

    count: int
    num_bytes: int


@dataclasses.dataclass(frozen=True)
class Instruction:
    """A line of HLO: its name, its type and operation, and what stands behind these."""

    name: str
    type: str
    opcode: str
    rest: str

    @property
    def operands(self) -> list[str]:
        """The names of the instructions that it reads."""
        return re.findall(r"%([\w.\-]+)", _in_parentheses(self.rest))

    @property
    def attributes(self) -> str:
        """What stands behind the operands."""
        return self.rest[len(_in_parentheses(self.rest)) :]


class Program:
    """A module of HLO, of which the text is given.

    Attributes:
        computations: Its functions by name, each a dict of instructions by name.
        entry: The name of the one that is called from outside.
    """

    def __init__(self, text: str):
        self.computations: dict[str, dict[str, Instruction]] = {}
        self.entry = ""
        for line in text.splitlines():
            if header := _COMPUTATION.match(line):
                current = self.computations.setdefault(header[2], {})
                self.entry = header[2] if header[1] else self.entry
            elif found := _INSTRUCTION.match(line):
                current[found[1]] = Instruction(*found.groups())
        if not self.entry:
            raise ValueError("This is not the text of a compiled program: no ENTRY.")

    def runs(self) -> dict[str, int]:
        """How often each computation runs; loops of unknown length: as one turn."""
        times = collections.Counter[str]()

        def visit(name: str, count: int) -> None:
            times[name] += count
            for instruction in self.computations[name].values():
                if instruction.opcode in _CALLERS:
                    trips = _TRIPS.search(instruction.attributes)
                    for called in _called(instruction):
                        visit(called, count * (int(trips[1]) if trips else 1))

        visit(self.entry, 1)
        return dict(times)

    def users(self, computation: str, name: str) -> list[Instruction]:
        """The instructions that read what one gives."""
        instructions = self.computations[computation].values()
        return [user for user in instructions if name in user.operands]

    def is_sliced(self, computation: str, name: str) -> bool:
        """Whether all that is ever read of an instruction's result is a slice of it."""
        users = self.users(computation, name)
        return bool(users) and all(
            self._reads_slice(computation, user, name) for user in users
        )

    def _reads_slice(self, computation: str, user: Instruction, name: str) -> bool:
        if user.opcode == "dynamic-slice":
            return user.operands[0] == name and user.operands.count(name) == 1
        if user.opcode in _SAME_VALUES:
            return self.is_sliced(computation, user.name)
        if user.opcode not in ("fusion", "call"):
            return False
        (called,) = _called(user)
        places = [i for i, operand in enumerate(user.operands) if operand == name]
        return all(
            self.is_sliced(called, inner.name)
            for inner in self.computations[called].values()
            if inner.opcode == "parameter"
            and int(_in_parentheses(inner.rest)) in places
        )


def collectives(text: str) -> dict[str, Collective]:
    """Counts what the devices send each other in one run of a compiled program.

    Args:
        text: The program, ``compiled.as_text()``. An instruction in a loop counts as
            often as the loop turns, if XLA knows (for a scan it does); else once.

    Returns:
        For each kind that occurs its `Collective`: those of `KINDS`, and `SLICED`.

    Raises:
        ValueError: If the text isn't that of a compiled program.
    """
    program = Program(text)
    found: dict[str, Collective] = {}
    for computation, times in program.runs().items():
        for kind, num_bytes in _collectives_in(program, computation):
            before = found.get(kind, Collective(0, 0))
            found[kind] = Collective(
                before.count + times, before.num_bytes + times * num_bytes
            )
    return {kind: found[kind] for kind in (*KINDS, SLICED) if kind in found}


def _collectives_in(program: Program, computation: str) -> Iterator[tuple[str, int]]:
    """The kind and bytes of each array that instructions of a computation exchange."""
    instructions = program.computations[computation]
    for instruction in instructions.values():
        # Of an asynchronous one, the end: the type of its start has its operands too.
        kind = instruction.opcode.removesuffix("-done")
        if kind not in KINDS:
            continue
        start = instruction
        if instruction.opcode != kind:
            start = instructions[instruction.operands[0]]
        if kind == "reduce-scatter":  # what goes in is the larger
            operands = [instructions[name].type for name in start.operands]
            arrays = [array for of_type in operands for array in _arrays(of_type)]
        else:
            arrays = list(_arrays(instruction.type))
        if kind == "all-to-all":  # a tuple of the parts of one array
            yield kind, sum(map(_num_bytes, arrays))
            continue
        for index, array in enumerate(arrays):
            is_sliced = kind == "all-reduce" and _is_result_sliced(
                program, computation, instruction, index
            )
            yield (_sliced(computation) if is_sliced else kind), _num_bytes(array)


def _sliced(computation: str) -> str:
    """What an all-reduce is whose result is sliced: on TPUs, they are one operation."""
    is_one = computation.startswith("all-reduce-scatter")
    return "reduce-scatter" if is_one else SLICED


def _is_result_sliced(
    program: Program, computation: str, instruction: Instruction, index: int
) -> bool:
    """Whether a device keeps only a slice of one of an instruction's results."""
    if not instruction.type.startswith("("):
        return program.is_sliced(computation, instruction.name)
    results = [
        user.name
        for user in program.users(computation, instruction.name)
        if re.search(rf"index={index}\b", user.attributes)
    ]
    return bool(results) and all(program.is_sliced(computation, x) for x in results)


def whole_arrays(text: str, shapes: Sequence[tuple[int, ...]]) -> list[str]:
    """Lists what a device holds whole, of arrays that should be divided.

    It looks at what goes into the program and comes out of it, all of which stays on
    the device between two steps. Within a step a device does have whole parameters, one
    or some at a time: those that `collectives` counts as gathered.

    Args:
        text: The program, ``compiled.as_text()``.
        shapes: The whole shapes of arrays of which each device should have a part.

    Returns:
        For each parameter and result of the program that has one of these shapes, what
        it is. Another array that happens to have such a shape is listed as well.
    """
    program = Program(text)
    entry = program.computations[program.entry].values()
    root = re.search(
        rf"^ENTRY %?{re.escape(program.entry)} \(.*-> (.*) \{{$", text, re.M
    )
    held = [
        (f"parameter {_op_name(x)}", array)
        for x in entry
        if x.opcode == "parameter"
        for array in _arrays(x.type)
    ]
    held += [(f"result {i}", array) for i, array in enumerate(_arrays(root[1]))]
    return [f"{name}: {dtype}{[*s]}" for name, (dtype, s) in held if s in shapes]


def _op_name(instruction: Instruction) -> str:
    found = re.search(r'op_name="([^"]*)"', instruction.attributes)
    return found[1] if found else instruction.name


def _called(instruction: Instruction) -> list[str]:
    """The computations that an instruction runs; of a loop its body alone."""
    called = _CALLED.findall(instruction.attributes)
    for branches in _BRANCHES.findall(instruction.attributes):
        called += [name.strip(" %") for name in branches.split(",")]
    return called


def _arrays(of_type: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The dtype and shape of each array in a type."""
    for dtype, sizes in _ARRAY.findall(of_type):
        yield dtype, tuple(int(size) for size in sizes.split(",") if size)


def _num_bytes(array: tuple[str, tuple[int, ...]]) -> int:
    dtype, shape = array
    bits = 8 if dtype == "pred" else int(re.search(r"\d+", dtype)[0])
    return math.prod(shape) * bits // 8


def _in_parentheses(rest: str) -> str:
    """The beginning of a text, up to the parenthesis that closes one before it."""
    depth = 1
    for place, letter in enumerate(rest):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if not depth:
            return rest[:place]
    return rest
