"""Single lines of programs: what is read from and written to an object at hand.

They are drawn from the object as it is at that point of the program, so that nearly all
of them are valid. Inside a function the object is called ``m``.
"""

from __future__ import annotations

import collections
import dataclasses

import graftree as nnx
from tests.differential import plain

# Values of one line are equal, by value or nearly; each differs in type or sign.
ALIKE = [
    ["1", "True", "1.0", "np.int8(1)", "np.int32(1)", "np.float32(1)", "np.float64(1)"],
    ["1", "np.bool_(True)", "Level.ONE", "Grade.ONE", "Kind.ONE", "complex(1)"],
    ["0", "False", "0.0", "-0.0", "np.float32(0)", "np.float32(-0.0)", "np.int64(0)"],
    ["-1", "-2", "-1.0", "-2.0", "np.int32(-1)", "np.int32(-2)"],
    ["NAN", "float('nan')", "np.float64('nan')", "None"],
    ["(1,)", "(True,)", "(1.0,)", "(Level.ONE,)", "(np.int8(1),)", "((1,),)", "(-1,)"],
    ["(0.0, 'a')", "(-0.0, 'a')", "(0, 'a')", "(False, 'a')", "(NAN, 'a')"],
    ["frozenset({1})", "frozenset({1.0})", "frozenset({True})", "frozenset({-1, -2})"],
    ["Box(1)", "Box(True)", "Box(1.0)", "Box((1,))", "Box((1.0,))", "Box(Box(True))"],
    ["Box(0.0)", "Box(-0.0)", "Box(frozenset({0}))", "Box(frozenset({0.0}))"],
    ["'a'", "'b'", "b'a'", "''", "np.str_('a')"],
    ["plus_one", "times_two", "jnp.tanh", "Block"],
    ["jnp.float32", "np.float32", "np.dtype('float32')"],
]
# The methods of these fail or lie, or they change in place.
HOSTILE = [
    ["EqRaises(1)", "EqRaises(True)", "EqRaises(2)", "Box(EqRaises(1))"],
    ["EqLies(1)", "EqLies(True)", "EqLies(2)", "(EqLies(1),)"],
    ["EqIsArray(1)", "EqIsArray(True)", "EqIsArray(2)"],
    ["HashRaises(1)", "HashRaises(True)", "HashRaises(2)"],
    ["Slotted(1)", "Slotted(True)", "Slotted(2)", "(Slotted(1),)"],
    ["Hidden(1)", "Hidden(2)"],
    ["collections.deque([1])", "collections.deque([True])", "collections.deque([2])"],
]
LINES = ALIKE + HOSTILE
STATICS = [text for line in ALIKE for text in line]
ALL_STATICS = [text for line in LINES for text in line]
NUMBERS = ["0.5", "1.0", "2.0", "3.0", "-1.0"]
NAMES = ["a", "b", "c", "d", "k", "n", "s"]
VARIABLES = ["nnx.Param", "nnx.Param", "nnx.BatchStat", "Scale", "Count"]


@dataclasses.dataclass(frozen=True)
class Place:
    """What stands somewhere in an object, and how a program names it."""

    text: str
    value: object
    parent: object = None
    key: object = None
    parent_text: str = ""


def places(x, text):
    """All places in an object, in order; what is shared only once."""
    seen = set()

    def visit(place):
        yield place
        if id(place.value) in seen:
            return
        seen.add(id(place.value))
        if not is_static(place.value):
            for key, child in plain.children(place.value):
                name = child_text(place, key)
                yield from visit(Place(name, child, place.value, key, place.text))

    return list(visit(Place(text, x)))


def child_text(place, key):
    if isinstance(place.value, (list, dict, nnx.List, nnx.Dict)):
        return f"{place.text}[{key!r}]"
    return f"{place.text}.{key}"


def is_module(x):
    return isinstance(x, nnx.Module) and not isinstance(x, (nnx.List, nnx.Dict))


def is_variable(x):
    return isinstance(x, nnx.Variable)


def is_static(x):
    kinds = (nnx.Pytree, nnx.Variable, list, dict)
    return not isinstance(x, kinds) and not plain.is_array(x)


def is_shared(x):
    """Whether something in an object can be reached in two ways."""
    found = [p.value for p in places(x, "") if not is_static(p.value)]
    found = [value for value in found if not plain.is_array(value)]
    return len({id(v) for v in found}) < len(found)


def _text(x):
    try:
        return repr(x)
    except RuntimeError:
        return ""


def _changes(x):
    """Whether a static value may be changed in place."""
    # Each run of the vocabulary has classes of its own.
    return any(type(x).__name__ == line[0].partition("(")[0] for line in HOSTILE) or (
        type(x) is collections.deque
    )


class Lines:
    """Draws lines.

    Args:
        random: Where chance comes from.
    """

    def __init__(self, random):
        self.random = random
        self.pick = random.choice

    def static(self, like=None):
        """A static value; often one that is nearly equal to another."""
        lines = [line for line in LINES if like in line]
        if lines and self.random.random() < 0.8:
            return self.pick(self.pick(lines))
        return self.pick(ALL_STATICS)

    def argument(self, like=None):
        """A static argument, which needs an ``==`` and a hash that work."""
        lines = [line for line in ALIKE if like in line]
        return self.pick(self.pick(lines) if lines else STATICS)

    def write_inside(self, x, text):
        """Changes a static value in place."""
        found = [p.text for p in places(x, text) if _changes(p.value)]
        boxes = [p for p in places(x, text) if is_variable(p.value)]
        found += [
            f"{p.text}.get_metadata('tag')"
            for p in boxes
            if _changes(p.value.get_metadata().get("tag"))
        ]
        number = self.pick(["1", "True", "2", "3.0"])
        return [f"changed({self.pick(found)}, {number})"] if found else []

    def array(self):
        return f"jnp.array([{self.pick(NUMBERS)}, {self.pick(NUMBERS)}])"

    def variable(self):
        tag = f", tag={self.static()}" if self.random.random() < 0.25 else ""
        return f"{self.pick(VARIABLES)}({self.array()}{tag})"

    def module(self, depth=0):
        kind = self.pick(["Block", "Block", "Special"])
        names = self.random.sample(NAMES, self.pick([1, 2, 3]))
        parts = [f"{name}={self.child(depth + 1)}" for name in names]
        return f"{kind}(p={self.variable()}, {', '.join(parts)})"

    def child(self, depth):
        kinds = ["variable", "static", "static", "array"]
        if depth < 3:
            kinds += ["module", "list", "dict", "plain_list", "plain_dict"]
        kind = self.pick(kinds)
        if kind in ("variable", "static", "array"):
            return getattr(self, kind)()
        if kind == "module":
            return self.module(depth)
        items = [self.item(depth) for _ in range(self.pick([1, 2]))]
        if kind == "list":
            return f"nnx.List([{', '.join(items)}])"
        if kind == "plain_list":
            return f"nnx.data([{', '.join(items)}])"
        named = ", ".join(map("=".join, zip("uv", items, strict=False)))
        return f"nnx.Dict({named})" if kind == "dict" else f"nnx.data(dict({named}))"

    def item(self, depth):
        return self.variable() if self.random.random() < 0.7 else self.module(depth + 1)

    def free_name(self, x, is_data=False):
        """A name that an attribute may have: what was data stays so until deleted."""
        taken = {k for k, v in plain.children(x) if is_static(v) == is_data}
        names = [name for name in NAMES if name not in taken]
        return self.pick(names) if names else None

    # What follows gives a list of lines; none if the object has no place for it.

    def read(self, x, text):
        """Adds to ``y`` a number that depends on one place, or on all."""
        place = self.pick(places(x, text)[1:] or [Place(text, x)])
        if is_variable(place.value):
            reads = [f"jnp.sum({place.text}[...])", f"jnp.sum({place.text}[...] ** 2)"]
            if plain.metadata(place.value):
                reads.append(f"code({place.text}.get_metadata('tag'))")
            return [f"y = y + {self.pick(reads)}"]
        if is_static(place.value):
            return [f"y = y + code({place.text})"]
        return [f"y = y + digest({place.text})"]

    def write_value(self, x, text, rows=False):
        """Writes one Variable, or two."""
        found = [p for p in places(x, text) if is_variable(p.value)]
        if not found:
            return []
        one, other = self.pick(found).text, self.pick(found).text
        number = self.pick(NUMBERS)
        forms = [
            [f"{one}[...] = {one}[...] * 0.5 + {number}"],
            [f"{one}.set_value({one}[...] * 0.5 - {number})"],
            [f"{one}[...] += {number}"],
            [f"old = {one}[...]", f"{one}[...] = {other}[...]", f"{other}[...] = old"],
        ]
        if not rows:
            forms.append([f"{one}[0] = {number}"])
            forms.append([f"{one}[...] = {self.array()}"])
        return self.pick(forms)

    def write_metadata(self, x, text):
        found = [p for p in places(x, text) if is_variable(p.value)]
        if not found:
            return []
        place = self.pick(found)
        known = dict(plain.metadata(place.value))
        if known and self.random.random() < 0.2:
            return [f"{place.text}.del_metadata('tag')"]
        like = known.get("tag")
        return [f"{place.text}.set_metadata(tag={self.static(_text(like))})"]

    def write_static(self, x, text):
        """Sets a static attribute, mostly to what is nearly equal to what it is."""
        found = [p for p in places(x, text)[1:] if is_module(p.parent)]
        found = [p for p in found if is_static(p.value)]
        if not found or self.random.random() < 0.2:
            name = self.free_name(x)
            return [f"{text}.{name} = {self.static()}"] if name else []
        place = self.pick(found)
        return [f"{place.text} = {self.static(_text(place.value))}"]

    def write_structure(self, x, text, sharing=False):
        """Adds, replaces, removes or swaps what an object holds."""
        found = places(x, text)
        modules = [p for p in found if is_module(p.value)]
        inner = [p for p in found[1:] if is_module(p.parent)]
        place = self.pick(modules)
        where = f"{place.text}.{self.free_name(place.value, is_data=True) or 'new'}"
        made = [self.variable(), self.module(2), self.array()]
        forms = [[f"{where} = {text}"] for text in made]
        if inner:
            one, other = self.pick(inner).text, self.pick(inner)
            forms.append([f"del {one}"])
            if not is_static(other.value) and sharing:
                forms.append([f"{where} = {other.text}"])
        forms += self._in_containers(found)
        arrays = [p.text for p in inner if plain.is_array(p.value)]
        forms += [[f"{one} = {one} * 0.5 + 1.0"] for one in arrays]
        return self.pick(forms)

    def _in_containers(self, found):
        for place in found:
            if isinstance(place.value, (list, nnx.List)):
                yield [f"{place.text}.append({self.variable()})"]
                yield [f"{place.text}[0] = {self.variable()}"]
                if len(place.value) > 1:
                    yield [f"{place.text}.pop({self.pick([0, -1])})"]
            elif isinstance(place.value, (dict, nnx.Dict)):
                key = self.pick("uvw")
                yield [f"{place.text}[{key!r}] = {self.variable()}"]
                if len(place.value) > 1:
                    yield [f"del {place.text}[{self.pick(sorted(place.value))!r}]"]
