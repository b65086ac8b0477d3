"""Programs that define functions over objects, and call them between mutations.

Each statement runs as plain Python as soon as it is drawn, so that the next one fits
what the objects are by then.
"""

from __future__ import annotations

import dataclasses
import random

import graftree as nnx
from tests.differential import bodies, plain, running
from tests.differential.running import GRAPH, GRAPH_UPDATES, TREE

# What a function may do to its object; each includes those before it.
NOTHING, VALUES, METADATA, STRUCTURE, OUTSIDE = range(5)
CALLS = ["1.0", "-1.0", "2.0", "0.5", "2", "np.float32(1)", "jnp.float32(-2)"]


@dataclasses.dataclass(frozen=True)
class Function:
    """A function of an object and a number, transformed or not.

    Attributes:
        name: Of the function.
        target: The object that it was made for, by its name in the program.
        changes: What it may do to it.
        static: Whether it takes a static argument, too.
    """

    name: str
    target: str
    changes: int
    static: bool = False


class Generator:
    """Makes one program.

    Args:
        seed: What it is made from.
    """

    def __init__(self, seed):
        self.seed = seed
        self.random = random.Random(seed)
        self.lines = bodies.Lines(self.random)
        self.pick = self.random.choice
        self.session = running.Session(running.plain_words(True))
        self.statements = []
        self.functions = []
        self.modes = [GRAPH_UPDATES, GRAPH, TREE]
        self.sharing = self.chance(0.4)

    def chance(self, share):
        return self.random.random() < share

    def program(self):
        """All of it."""
        self.add("kept = Block()")
        self.add(f"m = {self.lines.module()}")
        for _ in range(self.pick([0, 1, 2])):
            self.add_change()
        for _ in range(self.pick([1, 1, 2, 3])):
            self.add_function()
            self.add_call()
        for _ in range(self.pick([2, 3, 4])):
            for _ in range(self.pick([0, 1, 1, 2])):
                self.add_change()
            self.add_call()
        return running.Program(self.statements, tuple(self.modes), self.seed)

    @property
    def root(self):
        return self.session.names["m"]

    def add(self, text):
        self.statements.append(text)
        self.session.run(text)
        if "m" in self.session.names and bodies.is_shared(self.root):
            self.exclude(TREE)

    def exclude(self, *modes):
        self.modes = [mode for mode in self.modes if mode not in modes]

    # ------------------------------------------------------------ between the calls

    def add_change(self):
        """A statement that changes the object from outside."""
        kinds = {"write_value": 5, "write_metadata": 2, "write_static": 4}
        kinds |= {"write_structure": 4, "write_past": 1, "use_state": 2}
        kinds |= {"write_inside": 3}
        kind = self.random.choices(list(kinds), list(kinds.values()))[0]
        if kind == "write_structure":
            lines = self.lines.write_structure(self.root, "m", self.sharing)
        elif hasattr(self.lines, kind):
            lines = getattr(self.lines, kind)(self.root, "m")
        else:
            lines = getattr(self, kind)()
        if lines:
            self.add("\n".join(lines))

    def write_past(self):
        """Sets a static attribute without the class's hook."""
        name = self.lines.free_name(self.root)
        if not name:
            return []
        value = self.lines.static()
        forms = [
            f"vars(m)[{name!r}] = {value}",
            # As docs/look_up/differences.md asks for.
            f"object.__setattr__(m, {name!r}, {value})\nnnx.touch(m)",
            f"m.__dict__.update({name}={value})",
        ]
        return [self.pick(forms)]

    def use_state(self):
        found = bodies.places(self.root, "m")
        text = self.pick([p.text for p in found if bodies.is_module(p.value)])
        in_lists = [p for p in found if isinstance(p.parent, (list, nnx.List))]
        if self.chance(0.15) and not self.sharing and not in_lists:
            return [f"show(popped({text}, {self.pick(['nnx.BatchStat', 'Count'])}))"]
        if self.chance(0.2):
            return [f"m = {self.pick(['rebuilt', 'nnx.clone'])}(m)"]
        forms = [f"show(state_of({text}))", f"show(state_of({text}, nnx.Param))"]
        forms += [f"halved({text})", f"show(rebuilt({text}))"]
        forms += [f"show(nnx.clone(checked({text})))", f"show(digest({text}))"]
        return [self.pick(forms)]

    # ------------------------------------------------------------------- functions

    def add_function(self):
        """A transformed function of some module in the program."""
        found = bodies.places(self.root, "m")
        modules = [p for p in found if bodies.is_module(p.value)]
        target = self.pick([found[0], self.pick(modules)])
        makers = "jit jit jit_static gradient remat branches loop scan rows broadcast "
        makers += "jax_jit functional rule pair returning"
        getattr(self, self.pick(makers.split()))(target)

    def body(self, target, allowed, rows=False, both=(), fails=True):
        """The lines of a function of an object, after ``y = x``; what they may do."""
        changes, lines = NOTHING, []
        for _ in range(self.pick([1, 2, 2, 3])):
            kind = self.pick([NOTHING, VALUES, VALUES, METADATA, STRUCTURE, STRUCTURE])
            kind = min(kind, allowed)
            changes = max(changes, kind)
            lines += self.line(target.value, kind, rows)
        inner, done = self.inner_call(target, allowed, rows)
        lines += inner
        changes = max(changes, done)
        if self.chance(0.7):
            lines.append("y = y + digest(m)")
        if fails and self.chance(0.04):
            lines.append("raise ValueError('stop')")
        return ["y = x", *lines, *both, "return jnp.float32(y)"], changes

    def line(self, x, kind, rows):
        if kind == VALUES:
            return self.lines.write_value(x, "m", rows)
        if kind == METADATA:
            return self.lines.write_metadata(x, "m")
        if kind == STRUCTURE and (rows or self.chance(0.6)):
            return self.lines.write_static(x, "m")
        if kind == STRUCTURE:
            return self.lines.write_structure(x, "m", self.sharing)
        return self.lines.read(x, "m")

    def inner_call(self, target, allowed, rows):
        """A call of a function that is there already, of the object or a part of it."""
        known = [f for f in self.functions if f.changes <= allowed]
        known = [f for f in known if f"{f.target}.".startswith(f"{target.text}.")]
        if rows or not known or self.chance(0.4):
            return [], NOTHING
        f = self.pick(known)
        part = "m" + f.target[len(target.text) :]
        more = f", {self.lines.argument()}" if f.static else ""
        call = f"{f.name}({part}, {self.pick(['x', '1.0', '-1.0'])}{more})"
        return [f"y = y + {call}"], f.changes

    def define(self, name, lines, arguments="m, x", decorator=""):
        head = [decorator] if decorator else []
        body = [f"    {line}" for line in lines]
        self.add("\n".join([*head, f"def {name}({arguments}):", *body]))

    def name(self, prefix):
        return f"{prefix}{len(self.statements)}"

    def keep(self, name, target, changes, static=False):
        self.functions.append(Function(name, target.text, changes, static))

    def decorate(self, decorator, prefix, target, lines, changes):
        """Defines a function of an object and a number, and keeps it."""
        name = self.name(prefix)
        self.define(name, lines, decorator=decorator)
        self.keep(name, target, changes)

    def jit(self, target):
        lines, changes = self.body(target, self.pick([VALUES, STRUCTURE, STRUCTURE]))
        forms = ["@nnx.jit", "@nnx.jit", "@nnx.jit(donate_argnums=0)"]
        self.decorate(self.pick(forms), "jitted", target, lines, changes)

    def jit_static(self, target):
        lines, changes = self.body(target, self.pick([NOTHING, VALUES, STRUCTURE]))
        lines.insert(1, "y = y + code(s)")
        if self.chance(0.2) and changes == STRUCTURE:
            lines.insert(1, f"m.{self.lines.free_name(target.value) or 'new'} = s")
        name = self.name("special")
        forms = ["static_argnums=2", "static_argnames='s'", "static_argnums=(2,)"]
        self.define(name, lines, "m, x, s", f"@nnx.jit({self.pick(forms)})")
        self.keep(name, target, changes, static=True)

    def remat(self, target):
        lines, changes = self.body(target, self.pick([VALUES, STRUCTURE]))
        self.decorate("@nnx.remat", "remat", target, lines, changes)

    def jax_jit(self, target):
        if bodies.is_shared(self.root) or self.sharing:
            return self.jit(target)
        lines, _ = self.body(target, NOTHING)
        return self.decorate("@jax.jit", "jax", target, lines, NOTHING)

    def functional(self, target):
        """The same by hand: the object is split, and updated with what came back."""
        lines, changes = self.body(target, VALUES, fails=False)
        name = self.name("pure")
        self.define(f"inside_{name}", lines)
        self.add(f"{name} = functional(inside_{name})")
        self.keep(name, target, changes)

    def rule(self, target):
        lines, changes = self.body(target, NOTHING)
        name = self.name("rule")
        self.define(f"primal_{name}", lines)
        self.add(f"{name} = constant_rule(primal_{name}, {self.pick(bodies.NUMBERS)})")
        self.keep(name, target, changes)

    def pair(self, target):
        """A function of two objects, which may be one, or share what they hold."""
        found = bodies.places(target.value, "m")
        other = self.pick([p for p in found if bodies.is_module(p.value)])
        lines, changes = self.body(target, self.pick([VALUES, STRUCTURE]))
        more = self.lines.write_value(other.value, "n")
        if changes == STRUCTURE:
            more += self.lines.write_static(other.value, "n")
        lines[-1:] = [*more, "y = y + digest(n)", lines[-1]]
        name = self.name("pair")
        form = self.pick(["m, n, x", "both, x"])
        unpacked = ["m, n = both"] if form == "both, x" else []
        decorator = self.pick(["@nnx.jit", "@nnx.remat"])
        self.define(f"both_{name}", [*unpacked, *lines], form, decorator)
        given = {"both, x": f"[m, {other.text}]", "m, n, x": f"m, {other.text}"}[form]
        self.define(name, [f"return both_{name}({given}, x)"])
        self.exclude(TREE)
        self.keep(name, target, max(changes, VALUES))

    def returning(self, target):
        """A function that returns a part of its object, or a new one that holds it."""
        part = self.pick(bodies.places(target.value, "m"))
        if not isinstance(part.value, (nnx.Variable, nnx.Pytree)):
            return self.jit(target)
        lines, changes = self.body(target, self.pick([VALUES, STRUCTURE]))
        out = part.text
        if self.chance(0.4):
            out = f"Block(held={out}, k={self.lines.static()})"
        lines[-1] = f"return jnp.float32(y), {self.pick([out, f'dict(a={out})'])}"
        name = self.name("parts")
        self.define(f"two_{name}", lines, decorator="@nnx.jit")
        call = [f"y, out = two_{name}(m, x)", "kept.last = nnx.data(out)"]
        self.define(name, [*call, "return y + digest(out)"])
        self.exclude(GRAPH, TREE)
        self.keep(name, target, OUTSIDE)

    def gradient(self, target):
        lines, changes = self.body(target, self.pick([VALUES, STRUCTURE]))
        name = self.name("loss")
        self.define(name, lines)
        kind = self.pick(["grad", "value_and_grad"])
        if kind == "grad":
            call = [f"return gradient({kind}_{name}(m, x))"]
        else:
            call = [f"y, grads = {kind}_{name}(m, x)", "return y + gradient(grads)"]
        self.add(f"{kind}_{name} = nnx.{kind}({name})")
        self.define(f"of_{name}", call)
        self.keep(f"of_{name}", target, changes)

    def branches(self, target):
        both = self.line(target.value, STRUCTURE, False) if self.chance(0.2) else []
        number, name = self.pick([2, 3]), self.name("choice")
        changes = STRUCTURE if both else NOTHING
        for i in range(number):
            lines, done = self.body(target, self.pick([NOTHING, VALUES]), both=both)
            changes = max(changes, done)
            self.define(f"{name}_{i}", lines)
        names = ", ".join(f"{name}_{i}" for i in range(number))
        if number == 2:
            call = f"nnx.cond(x > 0, {names}, m, x)"
        else:
            index = "jnp.int32(x > 0) + jnp.int32(x > 1)"
            call = f"nnx.switch({index}, [{names}], m, x)"
        self.define(name, [f"return {call}"])
        self.keep(name, target, changes)

    def loop(self, target):
        lines, changes = self.body(target, VALUES)
        name = self.name("loop")
        self.define(f"step_{name}", lines)
        carried = f"m, y, x = carry\ny = y * 0.5 + step_{name}(m, x)".split("\n")
        if self.chance(0.5):
            self.define(f"body_{name}", [*carried, "return m, y, x"], "i, carry")
            call = f"nnx.fori_loop(0, 2, body_{name}, (m, jnp.float32(0), x))[1]"
        else:
            carried = [line.replace("m, y, x", "m, y, x, n") for line in carried]
            self.define(f"body_{name}", [*carried, "return m, y, x, n + 1"], "carry")
            self.define(f"while_{name}", ["return carry[3] < 2"], "carry")
            loops = f"while_{name}, body_{name}, (m, jnp.float32(0), x, 0)"
            call = f"nnx.while_loop({loops})[1]"
        self.define(name, [f"return {call}"])
        self.keep(name, target, changes)

    def scan(self, target):
        name = self.name("scan")
        how = self.pick(["carried", "rows", "broadcast"])
        if how == "rows" and not self.has_rows(target.value):
            how = "carried"
        allowed = NOTHING if how == "broadcast" else VALUES
        lines, changes = self.body(target, allowed, rows=how == "rows")
        self.define(f"step_{name}", lines)
        axes = {"carried": "0", "rows": "0, 0", "broadcast": "None, 0"}[how]
        step = f"step_{name}(m, x)"
        if how == "carried":
            body, arguments = ["m, y = carry", f"return (m, y + {step}), y"], "carry, x"
            call = f"scan_{name}((m, jnp.float32(x)), jnp.array([1.0, -1.0]))"
            total = "carry[1]"
        else:
            body, arguments = [f"return y + {step}, y"], "y, m, x"
            call = f"scan_{name}(jnp.float32(x), m, jnp.array([1.0, -1.0]))"
            total = "carry"
        self.define(f"body_{name}", body, arguments)
        options = f"in_axes=(nnx.Carry, {axes}), out_axes=(nnx.Carry, 0)"
        self.add(f"scan_{name} = nnx.scan(body_{name}, {options})")
        self.define(name, [f"carry, ys = {call}", f"return {total} + jnp.sum(ys)"])
        self.keep(name, target, changes)

    def rows(self, target):
        """A function that is mapped over the rows of the object."""
        if not self.has_rows(target.value):
            return self.broadcast(target)
        lines, changes = self.body(target, self.pick([VALUES, STRUCTURE]), rows=True)
        return self.mapped(target, lines, changes, "(0, None)", "x")

    def broadcast(self, target):
        """A function that is mapped over its number only."""
        lines, changes = self.body(target, NOTHING)
        if self.chance(0.5):
            write = self.lines.write_value(target.value, "m")
            lines = [lines[0], *write, *lines[1:]]
            changes = VALUES if write else changes
        return self.mapped(target, lines, changes, "(None, 0)", "jnp.array([x, -x])")

    def mapped(self, target, lines, changes, axes, argument):
        name = self.name("mapped")
        self.define(f"row_{name}", lines)
        self.add(f"map_{name} = nnx.vmap(row_{name}, in_axes={axes})")
        self.define(name, [f"return jnp.sum(map_{name}(m, {argument}))"])
        self.keep(name, target, changes)

    @staticmethod
    def has_rows(x):
        found = [p for p in bodies.places(x, "m") if plain.is_array(p.value)]
        values = [p.value for p in found] + [v.get_value() for v in plain.variables(x)]
        return bool(values) and all(v.shape == (2,) for v in values)

    # ----------------------------------------------------------------------- calls

    def add_call(self):
        if not self.functions:
            return
        f = self.pick(self.functions[-2:])
        x = self.pick(CALLS)
        if not f.static:
            forms = [f"{f.target}, {x}", f"{f.target}, {x}", f"{f.target}, x={x}"]
            self.add(f"show({f.name}({self.pick(forms)}))")
            return
        like = self.lines.argument()
        for _ in range(self.pick([1, 2, 3])):
            s = self.lines.argument(like)
            forms = [f"{f.target}, {x}, {s}", f"{f.target}, {x}, s={s}"]
            self.add(f"show({f.name}({self.pick(forms)}))")


def make(seed):
    """The program of a seed."""
    return Generator(seed).program()
