"""Programs in which control flow reaches a model otherwise than as an argument.

A call sees the present state of everything that its functions name, however they come
to it, in all modes. Each program draws a way to a model, or to a number, what calls it,
and what happens between the calls. All are texts of statements.
"""

from __future__ import annotations

import random

from tests.differential import bodies, running


def held(place, setup=""):
    """A function of the model that it finds in a place."""
    return f"{{forward}}\n{setup}\ndef on(x): return forward({place}, x)\n"


def made(text):
    """A statement that makes the function, of one that is called with the model."""
    return f"{{forward}}\n{text}\n"


# How ``on`` comes to the model ``m``. ``{read}`` is an expression in ``net`` and ``x``,
# ``{forward}`` a function of both that returns it.
WAYS = {
    "global": "def on(x):\n    net = m\n    return {read}\n",
    "closure": """\
def make(net):
    def on(x): return {read}
    return on
on = make(m)
""",
    "helper": held("m"),
    "helper of a helper": made("""\
def through(x): return forward(m, x)
def on(x): return through(x)"""),
    "inner function": """\
def on(x):
    def inner(x):
        net = m
        return {read}
    return inner(x)
""",
    "inner lambda": made("def on(x): return (lambda x: forward(m, x))(x)"),
    "lambda": made("on = lambda x: forward(m, x)"),
    "comprehension": made("def on(x): return sum([forward(m, x) for _ in range(2)])"),
    "namespace": held("holder.net", "holder = types.SimpleNamespace(net=m)"),
    "class attribute": held("Trainer.net", "class Trainer: net = m"),
    "plain object": held("caller.net", "caller = Caller(m, forward)"),
    "dict": held("store['net']", "store = dict(net=m)"),
    "list": held("store[0]", "store = [m]"),
    "weak reference": held("held()", "held = weakref.ref(m)"),
    "default argument": "def on(x, net=m): return {read}",
    "keyword default": "def on(x, *, net=m): return {read}",
    "decorator": "@logged\ndef on(x):\n    net = m\n    return {read}\n",
    "callable object": made("on = Caller(m, forward)"),
    "method": made("caller = Caller(m, forward)\non = caller.run"),
    "partial": made("on = functools.partial(forward, m)"),
    "partial of a lambda": made("on = functools.partial(lambda x: forward(m, x))"),
    "the model itself": "on = m",
    "bound method": "on = m.__call__",
    "property": held(
        "owner.net", "class Owner: net = property(lambda self: m)\nowner = Owner()"
    ),
    "static method": made("""\
class Steps:
    @staticmethod
    def step(x): return forward(m, x)
def on(x): return Steps.step(x)"""),
    "getattr": held("getattr(holder, 'net')", "holder = types.SimpleNamespace(net=m)"),
    "globals": held("globals()['m']"),
    "Variable": "v = m.p\ndef on(x): return jnp.sum(v[...]) * x\n",
}


def of(setup, result, changes):
    """A function of what some statements set up, and what changes that."""
    return f"{setup.strip()}\ndef on(x): return {result}\n", changes


# Ways to what is no model, with statements that change it, and what puts all back.
PLAIN_WAYS = {
    "global number": of(
        "scale = 1.0",
        "x * scale",
        ["scale = 5.0", "scale = 1", "scale = True", "scale = np.float32(3)"],
    ),
    "number through a helper": of(
        "scale = 1.0\ndef forward(x): return x * scale",
        "forward(x)",
        ["scale = 5.0", "scale = 7.0"],
    ),
    "type of a number": of(
        "kind = 1",
        "x + code(kind)",
        ["kind = 1.0", "kind = True", "kind = Level.ONE", "kind = np.int8(1)"],
    ),
    "zero": of(
        "kind = 0.0",
        "x + code(kind)",
        ["kind = -0.0", "kind = 0", "kind = False", "kind = (0.0,)", "kind = (-0.0,)"],
    ),
    "NumPy array in place": of(
        "table = np.ones(2, np.float32)",
        "x * table.sum()",
        ["table[0] = 5.0", "table += 1.0", "table = np.full(2, 3.0, np.float32)"],
    ),
    "JAX array": of(
        "table = jnp.ones(2)",
        "x * table.sum()",
        ["table = table + 1.0", "table = jnp.full(2, 7.0)"],
    ),
    "NumPy array in a closure": (
        """\
table = np.ones(2, np.float32)
def make(held): return lambda x: x * held.sum()
on = make(table)
""",
        ["table[0] = 5.0", "table += 1.0"],
    ),
    "list of numbers": of(
        "numbers = [1.0]",
        "x * sum(numbers)",
        ["numbers.append(2.0)", "numbers[0] = 5.0", "numbers = [3.0]"],
    ),
    "dict of numbers": of(
        "config = dict(a=1.0)",
        "x * config['a']",
        ["config['a'] = 2.0", "config = dict(a=5.0)", "config['a'] = True"],
    ),
    "attribute of a plain object": of(
        "holder = types.SimpleNamespace(scale=1.0)",
        "x * holder.scale",
        ["holder.scale = 2.0", "holder.scale = 5", "holder = Caller(1, 2)"],
    ),
    "class attribute": of(
        "class Config: scale = 1.0",
        "x * Config.scale",
        ["Config.scale = 2.0", "Config.scale = 5"],
    ),
    "equal callables": (
        "on = Named('a', 2.0)",
        ["on = Named('a', 3.0)", "on = Named('b', 2.0)", "on = Named('a', 5)"],
    ),
    "helper made anew": of(
        "def forward(x): return x",
        "forward(x)",
        ["forward = plus_one", "forward = times_two", "forward = Named('a', 3.0)"],
    ),
    "attribute of a function": (
        "def on(x): return x * on.scale\non.scale = 1.0",
        ["on.scale = 2.0", "on.scale = 3.0"],
    ),
    "default changed": (
        "def on(x, scale=1.0): return x * scale",
        ["on.__defaults__ = (2.0,)", "on.__defaults__ = (5.0,)"],
    ),
    "code changed": (
        "def on(x): return x\ndef other(x): return x * 2",
        ["on.__code__ = other.__code__"],
    ),
    "partial keyword": (
        """\
def forward(x, scale): return x * scale
on = functools.partial(forward, scale=1.0)
""",
        ["on.keywords['scale'] = 2.0", "on = functools.partial(forward, scale=3.0)"],
    ),
    "frozen dataclass": of(
        "box = Box(1.0)",
        "x + code(box)",
        ["box = Box(1)", "box = Box(True)", "box = Box((1,))", "box = Box((1.0,))"],
    ),
    "method of a NamedTuple": of(
        """
scale = 1.0
class Batch(typing.NamedTuple):
    x: object
    def scaled(self): return self.x * scale
""",
        "Batch(x).scaled()",
        ["scale = 2.0", "scale = 5"],
    ),
    "static field of a registered dataclass": of(
        """
scale = 1.0
@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    x: object
    apply: object = dataclasses.field(metadata=dict(static=True))
state = State(jnp.ones(2), lambda x: x * scale)
""",
        "state.apply(x) + state.x.sum()",
        ["scale = 2.0", "state.apply = plus_one", "state.x = state.x + 1"],
    ),
    "in the clothes of a function of JAX": of(
        """
scale = 1.0
@functools.wraps(jax.nn.relu)
def relu(x): return jax.nn.relu(x) * scale
""",
        "relu(x)",
        ["scale = 2.0", "scale = 5.0"],
    ),
    "code without a module": (
        """\
words = dict(factor=[1.0])
exec('class Scale:\\n    def run(self, x): return x * factor[0]', words)
exec('def on(x): return Scale().run(x)', words)
on = words['on']
""",
        ["words['factor'][0] = 2.0", "words['factor'] = [3.0]"],
    ),
    "metaclass": of(
        """
rate = 1.0
class Meta(type):
    @property
    def rate(cls): return rate
class Kind(metaclass=Meta): pass
""",
        "x * Kind.rate",
        ["rate = 2.0", "Meta.rate = 3.0", "Kind = types.SimpleNamespace(rate=4.0)"],
    ),
    "attribute of a module": of(
        "module = types.ModuleType('module')\nmodule.scale = 1.0",
        "x * module.scale",
        ["module.scale = 2.0", "vars(module)['scale'] = 5.0"],
    ),
    "function of JAX replaced": (
        "kept = jnp.sin\ndef on(x): return jnp.sin(x)",
        ["jnp.sin = lambda x: kept(x) * 2.0", "jnp.sin = jnp.cos", "jnp.sin = kept"],
        "jnp.sin = kept",
    ),
    "number of a generator": of(
        "numbers = iter(range(99))\nvalue = next(numbers)",
        "x * value",
        ["value = next(numbers)"],
    ),
    "operand with methods that are replaced": of(
        "class Bag(nnx.Dict): pass\nBag.scale = 1.0\nbag = Bag()",
        "x * type(bag).scale",
        ["Bag.scale = 2.0", "type(bag).scale = 5.0"],
    ),
    "derivative that reads a number": of(
        """
slope = 1.0
@jax.custom_jvp
def bent(x): return x * 1.0
bent.defjvp(lambda primals, tangents: (bent(*primals), tangents[0] * slope))
""",
        "bent(x)",
        ["slope = 2.0", "slope = 5.0"],
    ),
    "pullback that reads a number": of(
        """
slope = 1.0
@jax.custom_vjp
def bent(x): return x * 1.0
bent.defvjp(lambda x: (bent(x), None), lambda _, g: (g * slope,))
""",
        "bent(x)",
        ["slope = 2.0", "slope = 5.0"],
    ),
    "NumPy array of doubles in place": of(
        "table = np.ones(())\nrow = np.ones(2)",
        "x * table + (x * row).sum()",
        ["table[...] = 5.0", "row += 1.0", "row[0] = 7.0", "table -= 3.0"],
    ),
    "NumPy array behind a loop": of(
        "table = np.ones((), np.float32)",
        "jax.lax.fori_loop(0, 2, lambda i, x: x * table + table, x)",
        ["table[...] = 5.0", "table -= 3.0"],
    ),
}


def called(text, setup=""):
    """What calls ``on``: a function of what some statements set up."""
    return f"{setup}def call(x): return {text}\n"


COUNTED = "def body(i, x): return x * 0.5 + on_(x)\n"
AGAIN = "again = nnx.remat(lambda x: on_(x) * 0.5)\n"

CALLS = {
    "cond": called("nnx.cond(x > 0, on_, off, x)"),
    "the other branch": called("nnx.cond(x < 0, off, on_, x)"),
    "switch": called("nnx.switch(1, [off, on_, off], x)"),
    "fori_loop": called("nnx.fori_loop(0, 2, body, x)", COUNTED),
    "while_loop": called(
        "nnx.while_loop(going, body, (x, 0))[0]",
        """\
def body(c): return c[0] * 0.5 + on_(c[0]), c[1] + 1
def going(c): return c[1] < 2
""",
    ),
    "condition of while_loop": called(
        "nnx.while_loop(going, body, (x, 0))[1]",
        """\
def body(c): return c[0], c[1] + 1
def going(c): return (c[1] < 9) & (on_(c[0]) > 10 * c[1])
""",
    ),
    "scan": """\
def body(c, x): return c * 0.5 + on_(x), c
scanned = nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
def call(x):
    c, ys = scanned(x, jnp.array([1.0, 2.0]))
    return c + jnp.sum(ys)
""",
    "remat": called("again(x)", AGAIN),
    "derivative of a loop": called(
        "loop(x) + derivative(loop, x)",
        f"{COUNTED}def loop(x): return nnx.fori_loop(0, 2, body, x)\n",
    ),
    "derivative of remat": called("again(x) + derivative(again, x)", AGAIN),
    "second derivative of a branch": called(
        "derivative(lambda x: derivative(branch, x), x)",
        "def branch(x): return nnx.cond(x > 0, on_, off, x * x)\n",
    ),
    "grad": """\
def loss(v, x): return jnp.sum(v[...]) * on_(x)
def call(x):
    both = nnx.value_and_grad(loss)
    value, grads = both(nnx.Param(jnp.ones(2)), x)
    return value + gradient(grads)
""",
    "cond in a step that fills a holder": called(
        "step(m, x)",
        """\
holder = types.SimpleNamespace()
def inside(x): return digest(holder.net) + x
@nnx.jit
def step(m, x):
    holder.net = m
    return nnx.cond(x > 0, inside, lambda x: x, x)
""",
    ),
}

# ``on`` through another function, and the branch that is not taken.
REST = """\
def on_(x): return jnp.float32(on(x))
def off(x): return x
"""


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
    return running.Program(statements, tuple(running.MODES), seed), session.steps
