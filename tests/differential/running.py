"""Runs programs: as plain Python, and with the transforms in each mode."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import linecache
import pathlib
import re
import types
import warnings

import jax

import graftree
from tests.differential import plain, records

GRAPH_UPDATES, GRAPH, TREE = "graph updates", "graph", "tree"
MODES = {GRAPH_UPDATES: (True, True), GRAPH: (True, False), TREE: (False, False)}
VOCABULARY = pathlib.Path(__file__).with_name("vocabulary.py").read_text()


@dataclasses.dataclass
class Program:
    """A program.

    Attributes:
        statements: What runs, one after the other; an exception ends only its own.
        modes: The modes in which the library allows it.
        seed: What it was made from.
    """

    statements: list[str]
    modes: tuple[str, ...] = (GRAPH_UPDATES,)
    seed: int = 0

    def script(self, mode=GRAPH_UPDATES):
        """The program as a script that shows what it does."""
        graph, updates = MODES[mode]
        lines = [VOCABULARY, "show = print\n"]
        if mode != GRAPH_UPDATES:
            lines.append(f"nnx.set_graph_mode({graph})")
            lines.append(f"nnx.set_graph_updates({updates})")
        return "\n".join([*lines, *self.statements])


@functools.cache
def library_words():
    """The vocabulary with the library."""
    return _words(graftree)


@functools.cache
def plain_words(keeps_structure):
    nnx = plain.Plain(keeps_structure)
    return _words(nnx) | plain.words(nnx)


def _words(nnx):
    words = {"nnx": nnx, "__name__": "tests.differential.vocabulary"}
    text = VOCABULARY.replace("import graftree as nnx\n", "\n")
    exec(compile(text, "vocabulary.py", "exec"), words)
    return words


class Session:
    """One run of one program.

    Args:
        words: The vocabulary with the library to use.
        mode: The default mode; ``None`` leaves it to the library.
    """

    def __init__(self, words, mode=None):
        self.words = words
        self.names = dict(words, __name__="program")
        self.names["show"] = self._show
        if isinstance(words["nnx"], plain.Plain):
            self.names["jax"] = plain_jax(words["nnx"])
        self.mode = mode
        self.steps = []
        self.shown = []

    def _show(self, *values):
        self.shown += [records.of_result(self.words, value) for value in values]

    def run(self, text):
        """Runs one statement and notes what it did; gives the note."""
        self.shown = []
        error, told = "", []
        with contextlib.ExitStack() as stack:
            heard = stack.enter_context(warnings.catch_warnings(record=True))
            warnings.simplefilter("always")
            if self.mode:
                graph, updates = MODES[self.mode]
                stack.enter_context(self.words["nnx"].set_graph_mode(graph))
                stack.enter_context(self.words["nnx"].set_graph_updates(updates))
            try:
                exec(_compiled(text), self.names)
            except Exception as e:
                error = records.builtin_name(e)
                told = [f"{type(e).__name__}: {e}", *getattr(e, "__notes__", ())]
        told += [f"{x.category.__name__}: {x.message}" for x in heard]
        told = [_ADDRESS.sub("0x", text) for text in told]
        self.steps.append(records.Step(error, told, self.shown, self._state()))
        return self.steps[-1]

    def _state(self):
        nnx = self.words["nnx"]
        describe = records.Description(self.words).of
        kinds = (nnx.Variable, nnx.Pytree)
        found = sorted(self.names.items())
        return {name: describe(x) for name, x in found if isinstance(x, kinds)}


_ADDRESS = re.compile("0x[0-9a-f]+")


@functools.lru_cache(maxsize=4096)
def _compiled(text):
    name = f"<statement {hash(text)}>"
    linecache.cache[name] = len(text), None, text.splitlines(True), name
    return compile(text, name, "exec")


def plain_jax(nnx):
    """JAX, with a ``jit`` that only calls."""
    return types.SimpleNamespace(**vars(jax) | {"jit": nnx.jit})


def run(statements, words, mode=None):
    session = Session(words, mode)
    for text in statements:
        session.run(text)
    return session.steps


def difference(program, mode):
    """How the library differs from plain Python in a program; ``None`` if it doesn't.

    See `records.first_difference`.
    """
    expected = run(program.statements, plain_words(mode == GRAPH_UPDATES))
    actual = run(program.statements, library_words(), mode)
    return records.first_difference(expected, actual)


def difference_of_caches(program, mode):
    """How a program differs without all that is remembered between calls."""
    with_caches = run(program.statements, library_words(), mode)
    with graftree.debugging.disable_caches():
        without = run(program.statements, library_words(), mode)
    return records.first_difference(without, with_caches, exactly=True)


def clear():
    """Frees what JAX keeps of the programs so far."""
    jax.clear_caches()
    _compiled.cache_clear()


# --------------------------------------------------------------------- smaller programs


def shrunk(program, mode, find):
    """The program with as little left as still gives a difference of the same kind."""

    def failure(statements):
        return find(dataclasses.replace(program, statements=statements), mode)

    found = failure(program.statements)
    if not found:
        return program

    def fails(statements):
        smaller = failure(statements)
        return smaller and smaller[1] == found[1]

    statements = program.statements[: found[0] + 1]
    before = None
    while statements != before:
        before = statements
        statements = without_parts(statements, fails)
        for number in range(len(statements)):
            statements = without_lines(statements, number, fails)
    return dataclasses.replace(program, statements=statements)


def without_lines(statements, number, fails):
    """The statements with as few lines of one of them as possible."""

    def given(lines):
        return [*statements[:number], "\n".join(lines), *statements[number + 1 :]]

    lines = statements[number].split("\n")
    return given(without_parts(lines, lambda fewer: fails(given(fewer))))


def without_parts(items, fails):
    """A sublist from which nothing can be dropped; larger parts are tried first."""
    size = max(len(items) // 2, 1)
    while True:
        start = 0
        while start < len(items):
            fewer = [*items[:start], *items[start + size :]]
            if fewer and fails(fewer):
                items = fewer
            else:
                start += size
        if size == 1:
            return items
        size //= 2
