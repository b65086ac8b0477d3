"""Programs in which control flow reaches a model otherwise than as an argument.

A call sees the present state of everything that its functions name, however they come
to it, in all modes. Each program draws a way, a transform, and what happens between
the calls.
"""

from __future__ import annotations

import random

from tests.differential import bodies, running
from tests.differential.ways import CALLS, PLAIN_WAYS, REST, WAYS


def make(seed, ways=None, calls=None):
    """A program of a seed, and its steps in plain Python.

    Args:
        seed: What it is made from.
        ways: The names of the ways to choose from; all if not given.
        calls: The names of the transforms to choose from; all if not given.
    """
    chance = random.Random(f"captures {seed}")
    way = chance.choice(ways or [*WAYS, *PLAIN_WAYS])
    call = chance.choice(calls or [*CALLS])
    lines = bodies.Lines(chance)
    session = running.Session(running.plain_words(True))
    statements = []

    def add(text):
        text = text.strip()
        statements.append(text)
        session.run(text)

    def change():
        if way in PLAIN_WAYS:
            return chance.choice(PLAIN_WAYS[way][1])
        if chance.random() < 0.15:
            # Which of the ways see another model of this name is a matter of Python.
            return f"m = {lines.module()}"
        kinds = ["write_value", "write_metadata", "write_static", "write_structure"]
        drawn = getattr(lines, chance.choice(kinds))(session.names["m"], "m")
        return "\n".join(drawn) or "pass"

    read = chance.choice(["digest(net) + x", "jnp.sum(net.p[...]) * x + digest(net)"])
    parts = {"read": read, "forward": f"def forward(net, x):\n    return {read}"}
    add(f"m = {lines.module()}")
    add(PLAIN_WAYS[way][0] if way in PLAIN_WAYS else WAYS[way].format(**parts))
    add(REST)
    add(CALLS[call] if chance.random() < 0.2 else CALLS[call].replace("on_", "on"))
    add("show(call(jnp.float32(1)))")
    for _ in range(chance.choice([2, 3])):
        for _ in range(chance.choice([1, 1, 2])):
            add(change())
        add("show(call(jnp.float32(1)))")
    for text in PLAIN_WAYS.get(way, ())[2:]:
        add(text)
    traits = frozenset({f"way: {way}", f"call: {call}"})
    program = running.Program(statements, tuple(running.MODES), seed, traits)
    return program, session.steps
