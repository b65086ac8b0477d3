"""Static values are told apart by type and value, wherever they are a key.

Issue 12, defects §2 to §4: ``1``, ``True`` and ``1.0`` were taken for one another.
"""

import dataclasses
import enum
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests.modes import BY_NAME, GRAPH_UPDATES
from tests.zoo import Box


class Size(enum.IntEnum):
    ONE = 1
    TWO = 2


class Flag(enum.Enum):
    ONE = 1


@dataclasses.dataclass(frozen=True)
class Config:
    size: object = 1


class Collides:
    """Equal to none of its kind but by number; the hash of all is one."""

    def __init__(self, number):
        self.number = number

    def __eq__(self, other):
        return isinstance(other, Collides) and self.number == other.number

    def __hash__(self):
        return 0

    def __repr__(self):
        return f"Collides({self.number!r})"


VALUES = [
    *(1, True, 1.0, np.int8(1), np.int32(1), np.float32(1), Size.ONE, Flag.ONE, 1 + 0j),
    *(0, False, 0.0, -0.0, np.float32(0), np.float32(-0.0), complex(0.0, -0.0)),
    *(-1, -2, "1", b"1", None, (), frozenset()),
    *((1,), (True,), (1.0,), ((1,),), ((1.0,),), (0.0,), (-0.0,)),
    *(frozenset([1]), frozenset([1.0]), frozenset([(1, 2.0)]), frozenset([(1.0, 2)])),
    *(Config(), Config(True), Config(1.0), Config((1,)), Config((1.0,))),
    *(Collides(1), Collides(2), Collides(1.0)),
]


def model():
    return Box(p=nnx.Param(jnp.ones(())), k=None)


def told(x):
    """What is to be seen of a static value."""
    return f"{type(x).__name__} {x!r}"


@pytest.fixture
def seen():
    return []


@pytest.mark.parametrize("form", ["position", "name", "without a model"])
def test_static_arguments(mode, form, seen):
    @functools.partial(nnx.jit, static_argnames="s", **mode)
    def f(m, s):
        seen.append(told(s))

    for s in VALUES * 3:
        m = 1.0 if form == "without a model" else model()
        f(m, s=s) if form == "name" else f(m, s)
    assert seen == [*map(told, VALUES)]


JITS = {name: functools.partial(nnx.jit, **mode) for name, mode in BY_NAME.items()}
JITS["jax.jit"] = jax.jit


@pytest.mark.parametrize("name", JITS)
def test_static_attributes_set_outside(name, seen):
    f = JITS[name](lambda m: seen.append(told(m.k)))
    m = model()
    for m.k in VALUES * 3:
        f(m)
    assert seen == [*map(told, VALUES)]


@pytest.mark.parametrize("transform", [nnx.jit, nnx.remat, nnx.grad, nnx.vmap])
def test_static_attributes_set_inside(transform):
    m = model()
    m.p = nnx.Param(jnp.ones(1))
    for value in VALUES:

        @functools.partial(transform, **GRAPH_UPDATES)
        def f(m, value=value):
            m.k = value
            return m.p.sum()

        f(m)
        assert told(m.k) == told(value)


def test_memos_of_functions_that_take_apart(graph):
    m = model()
    for value in VALUES * 2:
        m.k = value
        for _ in range(3):
            graphdef, state = nnx.split(m, graph=graph)
            assert told(nnx.merge(graphdef, state).k) == told(value)
            assert told(nnx.clone(m, graph=graph).k) == told(value)
    m.k = VALUES[0]
    first = nnx.graphdef(m, graph=graph)
    for m.k in VALUES[1:]:
        assert nnx.graphdef(m, graph=graph) != first


def test_metadata(mode, seen):
    f = nnx.jit(lambda m: seen.append(told(m.p.tag)), **mode)
    m = model()
    for _ in range(3):
        for tag in VALUES:
            m.p.set_metadata(tag=tag)
            f(m)
    assert seen == [*map(told, VALUES)]
    for tag in VALUES:

        @functools.partial(nnx.jit, **mode)
        def change(m, tag=tag):
            m.p.set_metadata(tag=tag)

        change(m)
        assert told(m.p.tag) == told(tag)


@pytest.mark.parametrize("numbers", [(1, 1.0), (-1, -2), (0.0, -0.0)])
def test_a_static_value_that_was_changed_in_place(numbers, seen):
    f = nnx.jit(lambda m: seen.append(told(m.k.number)))
    m = model()
    m.k = Collides(None)
    for m.k.number in numbers * 3:
        f(m)
    assert seen == [*map(told, numbers)]


class Constant(nnx.Pytree):
    """An object without data, which is hashed by content."""

    def __init__(self, size):
        self.size = size

    def __eq__(self, other):
        return self.size == other.size

    def __hash__(self):
        return hash(self.size)


DATA = {
    "Module": model,
    "first Module": model,
    "Variable": lambda: nnx.Param(jnp.ones(())),
    "array": lambda: jnp.ones(()),
    "in a tuple": lambda: (1, model()),
    "partial": lambda: functools.partial(Box.__init__, model()),
    "method": lambda: model().train,
}


@pytest.mark.parametrize("name", DATA)
@pytest.mark.parametrize("transform", [nnx.jit, nnx.remat, nnx.pmap])
def test_data_is_refused_as_a_static_argument(transform, name):
    option = "static_broadcasted_argnums" if transform is nnx.pmap else "static_argnums"
    number = 0 if name == "first Module" else 1
    f = transform(lambda x, y: 1.0, **{option: number})
    args = [jnp.ones(1), jnp.ones(1)]
    args[number] = DATA[name]()
    with pytest.raises(nnx.errors.StaticArgumentError) as error:
        f(*args)
    assert isinstance(error.value, TypeError) and isinstance(error.value, ValueError)
    assert f"argument {number}: {type(args[number]).__name__}" in str(error.value)
    assert "Pass it as an ordinary argument" in str(error.value)


def test_a_hashable_object_without_data_may_be_static():
    f = nnx.jit(lambda x, c: x * c.size, static_argnums=1)
    assert [f(1.0, Constant(2)), f(1.0, Constant(3))] == [2.0, 3.0]
