"""Smaller programs that fail in the same way."""

from __future__ import annotations

import dataclasses

from tests.differential import running


def shrunk(program, mode):
    """The program with as little left as still gives a difference of the same kind."""

    def failure(statements):
        smaller = dataclasses.replace(program, statements=statements)
        expected = running.expected_of(smaller, mode)
        found = running.difference(smaller, mode, expected)
        return found and (found[0], found[1], expected[found[0]].error)

    found = failure(program.statements)
    if not found:
        return program

    def fails(statements):
        smaller = failure(statements)
        return smaller and smaller[1:] == found[1:]

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
