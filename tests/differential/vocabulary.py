"""What random programs are made of: classes, static values, and numbers for them.

It is executed with the library, or with its stand-in, as ``nnx``, and printed at the
top of a program that was found to fail.
"""

import collections
import dataclasses
import enum
import io
import types
import zlib

import jax
import jax.numpy as jnp
import numpy as np

import graftree as nnx


class Block(nnx.Module):
    """A Module with the attributes that it is given."""

    def __init__(self, **attributes):
        for name, value in attributes.items():
            setattr(self, name, value)

    def __call__(self, x):
        return digest(self) + x


class Special(Block):
    """Another type of the same structure."""


class Scale(nnx.Param):
    """A kind of Param that the library doesn't know."""


class Count(nnx.Variable):
    """A kind of Variable that is no Param."""


# Members that are equal to integers, to those of another type, and to nothing else.
Level = enum.IntEnum("Level", "ONE TWO")
Grade = enum.IntEnum("Grade", "ONE")
Kind = enum.Enum("Kind", "ONE")


@dataclasses.dataclass(frozen=True)
class Box:
    """A static value that holds another."""

    content: object


class Hostile:
    """A static value whose methods fail, lie, or return arrays."""

    def __init__(self, content):
        self.content = content


def fail(*_):
    raise RuntimeError("a method of a value was called")


class EqRaises(Hostile):
    __eq__ = __repr__ = __bool__ = __len__ = fail

    def __hash__(self):
        return 1


class EqLies(Hostile):
    def __eq__(self, other):
        return True

    def __hash__(self):
        return 1


class EqIsArray(Hostile):
    def __eq__(self, other):
        return np.array([True, False])

    def __hash__(self):
        return 1


class HashRaises(Hostile):
    __hash__ = __reduce_ex__ = fail

    def __eq__(self, other):
        return type(other) is type(self) and exact(self) == exact(other)


class Slotted:
    """Equal by what is in its slot."""

    __slots__ = ("content",)

    def __init__(self, content):
        self.content = content

    def __eq__(self, other):
        return type(other) is Slotted and exact(self) == exact(other)


class Hidden(io.StringIO):
    """Equal by what is in it, where nothing can look into it."""

    __hash__ = None
    __reduce_ex__ = fail

    def __init__(self, content):
        super().__init__()
        self.content = content

    def __eq__(self, other):
        return type(other) is Hidden and exact(self) == exact(other)

    def _write(self, content):
        self.seek(0)
        self.truncate()
        self.write(exact(content))

    content = property(io.StringIO.getvalue, _write)


def changed(x, content):
    """Puts something else into a value, in place."""
    if isinstance(x, collections.deque):
        x[0] = content
    else:
        x.content = content


def plus_one(x):
    return x + 1


def times_two(x):
    return x * 2


NAN = float("nan")


def exact(x):
    """The type and the value of something static, in words."""
    kind = type(x).__module__ + "." + type(x).__qualname__
    if isinstance(x, enum.Enum):
        return f"{kind}.{x.name}"
    if isinstance(x, (float, complex, np.floating)):
        return f"{kind} {float(np.real(x)).hex()}"
    if isinstance(x, tuple):
        return f"{kind} ({', '.join(map(exact, x))})"
    if isinstance(x, frozenset):
        return f"{kind} {{{', '.join(sorted(map(exact, x)))}}}"
    if isinstance(x, (Hostile, Slotted, Hidden, collections.deque)):
        inside = tuple(x) if isinstance(x, collections.deque) else (x.content,)
        return f"{kind} {exact(inside)}"
    if isinstance(x, Box):
        return f"{kind} {exact((x.content,))}"
    if isinstance(x, (type, types.FunctionType)):
        return f"{x.__qualname__} itself"
    return f"{kind} {x!r}"


def code(x):
    """A number that depends on the type and the value of something static."""
    return zlib.crc32(exact(x).encode()) % 997


def children(x):
    """The keys and values of an object or a container; none for others."""
    if isinstance(x, (nnx.List, list, tuple)):
        return list(enumerate(x))
    if isinstance(x, nnx.Dict) or type(x) is dict:
        return sorted(x.items(), key=str)
    if isinstance(x, nnx.Pytree):
        return sorted((k, v) for k, v in vars(x).items() if not k.startswith("_"))
    return []


LIBRARY_METADATA = {"hijax", "ref", "eager_sharding"}


def metadata(variable):
    """The metadata of the user, sorted."""
    entries = variable.get_metadata().items()
    return sorted((k, v) for k, v in entries if k not in LIBRARY_METADATA)


def is_array(x):
    return isinstance(x, (jax.Array, np.ndarray))


def digest(x):
    """A number that depends on all that is in an object, at whatever depth."""
    return jnp.float32(_digest(x, {}))


def _digest(x, seen):
    if is_array(x):
        return jnp.sum(x + 0.125 * x * x)
    is_object = isinstance(x, (nnx.Variable, nnx.Pytree, list, dict))
    if not is_object and not (type(x) is tuple and x and is_array(x[0])):
        return code(x)
    if id(x) in seen:
        return seen[id(x)]
    seen[id(x)] = len(seen)
    total = code(type(x).__name__)
    if isinstance(x, nnx.Variable):
        value = _digest(x.get_value(), seen)
        return total + value * (1 + code(tuple(metadata(x))) % 5)
    for key, child in children(x):
        total = total + _digest(child, seen) * (1 + code(str(key)) % 3)
    return total


def gradient(grads):
    """The sum of all gradients of Params, whatever they came in."""
    if isinstance(grads, nnx.Variable):
        return jnp.sum(grads.get_value())
    flat = nnx.to_flat_state(nnx.state(grads, nnx.Param))
    values = [jnp.sum(v.get_value()) * (1 + i % 3) for i, (_, v) in enumerate(flat)]
    return jnp.float32(sum(values))


def checked(x):
    """An object; without structural updates an array may be in its place."""
    if not isinstance(x, nnx.Pytree):
        raise TypeError("not an object")
    return x


def state_of(x, *filters):
    """The values of an object by path."""
    flat = nnx.to_flat_state(nnx.state(checked(x), *filters))
    return {
        "/".join(map(str, path)): v.get_value() if isinstance(v, nnx.Variable) else v
        for path, v in flat
    }


def rebuilt(x):
    """A copy of an object, from its structure and state."""
    return nnx.merge(*nnx.split(checked(x)), copy=True)


def halved(x):
    """Writes half of each value into an object, through its state."""
    nnx.update(x, jax.tree.map(lambda v: v * 0.5, nnx.state(checked(x))))


def popped(x, kind):
    """Takes all Variables of a type out of an object; how many numbers they held."""
    return jnp.float32(sum(v.size for v in jax.tree.leaves(nnx.pop(checked(x), kind))))


def functional(f):
    """A function of an object and a number, by hand: split, ``jax.jit``, update."""

    @jax.jit
    def pure(graphdef, state, x):
        m = nnx.merge(graphdef, state)
        return f(m, x), nnx.state(m)

    def call(m, x):
        y, state = pure(*nnx.split(m), x)
        nnx.update(m, state)
        return y

    return call


def constant_rule(f, factor):
    """A function with a derivative of its own: a number, for all in an object."""
    ruled = nnx.custom_vjp(f)

    def forward(m, x):
        return ruled(m, x), nnx.clone(m)

    def backward(m, g):
        if isinstance(g, tuple):  # with graph updates: that of the updates comes first
            (m, _), g = g
        return jax.tree.map(lambda v: jnp.full_like(v, factor) * g, m), jnp.zeros(())

    ruled.defvjp(forward, backward)
    return lambda m, x: ruled(m, jnp.float32(x))
