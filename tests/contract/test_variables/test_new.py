"""`__new__` of classes beside Module runs as in any Python class."""

import pytest

import graftree as nnx


class Recorded:
    def __new__(cls, *args, **kwargs):
        obj = super().__new__(cls)
        vars(obj)["given"] = args, kwargs
        return obj


class Single:
    one = None

    def __new__(cls, *args, **kwargs):
        if cls.one is None:
            cls.one = super().__new__(cls)
        return cls.one


class Strict:
    def __new__(cls, a):
        obj = super().__new__(cls)
        obj.doubled = 2 * a
        return obj


class Passing:
    def __new__(cls, *args, **kwargs):
        return super().__new__(cls, *args, **kwargs)


class Bare:
    pass


class Ready:
    def __init__(self, a=0):
        self.a = a


PARTS = [Recorded, Single, Strict, Passing, Bare]
CALLS = [((), {}), ((1,), {}), ((), {"a": 1}), ((1, 2), {})]


def made(bases, body, args, kwargs):
    """What comes of making two objects of a class with these bases."""
    cls = type("Made", bases, body)
    try:
        one, two = (cls(*args, **kwargs) for _ in range(2))
    except TypeError as error:
        # Python's own words differ in the name that they begin with.
        return str(error).partition("(")[2] or str(error)
    items = {k: v for k, v in vars(one).items() if not k.startswith("_pytree")}
    return items, one is two


@pytest.mark.parametrize("call", CALLS, ids=str)
@pytest.mark.parametrize("ready", [True, False], ids=["init", "no init"])
@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.__name__)
@pytest.mark.parametrize("comes_first", [True, False], ids=["before", "behind"])
@pytest.mark.parametrize("base", [nnx.Module, nnx.Object, nnx.Pytree])
def test_objects_are_made_as_without_module(base, comes_first, part, ready, call):
    body = {"__init__": Ready.__init__} if ready else {}
    expected = made((part,), dict(body), *call)
    part.one = None
    bases = (part, base) if comes_first else (base, part)
    assert made(bases, dict(body), *call) == expected


def test_what_new_sets_is_checked_and_told_apart():
    class Layer(nnx.Module, Recorded):
        def __init__(self, units):
            self.units = units

    layer = Layer(units=3)
    assert layer.given == ((), {"units": 3})
    graphdef, state = nnx.split(layer)
    assert nnx.merge(graphdef, state).given == layer.given
    with pytest.raises(ValueError, match="static attribute 'given'"):
        Layer(units=nnx.Param(1.0))


def test_bridge_modules_have_cooperative_new_too():
    pytest.importorskip("flax")

    class Layer(nnx.bridge.Module, Recorded):
        units: int

    assert Layer(units=3).given == ((), {"units": 3})
