"""Values of users whose special methods raise, lie, or return arrays."""

import io

import jax
import numpy as np


def fail(*_):
    raise RuntimeError("a method of a user's value was called")


class Hostile:
    """A value that holds another; each class below has one kind of fault."""

    def __init__(self, content, extra=0):
        self.content, self.extra = content, extra

    def __repr__(self):
        return f"{type(self).__name__}({self.content!r})"


class EqRaises(Hostile):
    __eq__ = fail

    def __hash__(self):
        return 1


class EqLies(EqRaises):
    def __eq__(self, other):
        return True

    __hash__ = EqRaises.__hash__


class EqIsArray(EqRaises):
    def __eq__(self, other):
        return np.array([True, False])

    __hash__ = EqRaises.__hash__


class HashRaises(Hostile):
    __hash__ = fail

    def __eq__(self, other):
        return type(other) is type(self) and self.content == other.content


class ReprRaises(Hostile):
    __repr__ = __str__ = __format__ = fail


class BoolRaises(Hostile):
    __bool__ = __len__ = fail


class GetattrRaises(Hostile):
    def __getattr__(self, name):
        if name in ("content", "extra"):  # while it is made
            raise AttributeError(name)
        fail()


class GetattrLies(Hostile):
    def __getattr__(self, name):
        return 1


class Unpicklable(HashRaises):
    __hash__ = None
    __reduce_ex__ = __getstate__ = fail


class Everything(Hostile):
    __eq__ = __hash__ = __repr__ = __str__ = __format__ = __bool__ = __len__ = fail
    __iter__ = __contains__ = __lt__ = __reduce_ex__ = fail


KINDS = [
    *(EqRaises, EqLies, EqIsArray, HashRaises, ReprRaises, BoolRaises),
    *(GetattrRaises, GetattrLies, Unpicklable, Everything),
]


def as_pytree(kind):
    """A pytree type of this kind: the content is data, the rest is not."""
    made = type(f"Tree{kind.__name__}", (kind,), {})
    jax.tree_util.register_pytree_node(
        made, lambda x: ((x.content,), x.extra), lambda extra, x: made(*x, extra)
    )
    return made


PYTREES = [*map(as_pytree, KINDS)]


class Hidden(io.StringIO):
    """A value with its content in C, where nothing can look into it."""

    __hash__ = None
    __reduce_ex__ = fail

    def __eq__(self, other):
        return type(other) is Hidden and self.getvalue() == other.getvalue()
