"""A class says itself whether its objects may change: `_check_valid_context`.

Every way of changing an object asks it, as in Flax NNX. So Keras builds layers while
it infers shapes.
"""

import jax
import jax.numpy as jnp
import pytest

import graftree as nnx

pytestmark = pytest.mark.filterwarnings("ignore:Calling Module.sow")


def set_item(node, key, value):
    node[key] = value


def del_item(node, key):
    del node[key]


class Parts:
    """What the objects below are made of."""

    def __init__(self):
        self.a = 1
        self.list = self.List([1, 2, 3])
        self.dict = self.Dict(a=1, b=2)
        self.param = nnx.Param(jnp.ones(2))


def family(check):
    """A Module whose parts all have this check."""

    class List(nnx.List):
        _check_valid_context = check

    class Dict(nnx.Dict):
        _check_valid_context = check

    class Model(Parts, nnx.Module, pytree=False):
        _check_valid_context = check

    Model.List, Model.Dict = List, Dict
    return Model


WRITES = {
    "setattr": lambda m: setattr(m, "a", 2),
    "new": lambda m: setattr(m, "b", 2),
    "delattr": lambda m: delattr(m, "a"),
    "list[i]=": lambda m: set_item(m.list, 0, 5),
    "list[:]=": lambda m: set_item(m.list, slice(0, 2), [5, 6]),
    "del list[i]": lambda m: del_item(m.list, 1),
    "del list[:]": lambda m: del_item(m.list, slice(0, 2)),
    "append": lambda m: m.list.append(4),
    "extend": lambda m: m.list.extend([4, 5]),
    "insert": lambda m: m.list.insert(1, 9),
    "pop": lambda m: m.list.pop(),
    "reverse": lambda m: m.list.reverse(),
    "clear": lambda m: m.list.clear(),
    "del list.0": lambda m: delattr(m.list, "0"),
    "dict[k]=": lambda m: set_item(m.dict, "c", 3),
    "del dict[k]": lambda m: del_item(m.dict, "a"),
    "dict.pop": lambda m: m.dict.pop("a"),
    "dict.update": lambda m: m.dict.update(c=3),
    "sow": lambda m: m.sow(nnx.Intermediate, "h", 1),
    "nnx.pop": lambda m: nnx.pop(m, nnx.Param),
    "set_attributes": lambda m: m.set_attributes(a=7),
}


def outcome(model):
    items = {k: v for k, v in vars(model).items() if not k.startswith("_pytree")}
    parts = items.pop("list", ()), items.pop("dict", {})
    return sorted(items), items.get("a"), list(parts[0]), dict(parts[1])


def in_a_trace(write, model):
    jax.eval_shape(lambda x: (write(model), x)[1], 1.0)


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_objects_that_allow_it_change_inside_another_trace(write):
    model, expected = (family(lambda self, error_msg: None)() for _ in range(2))
    in_a_trace(write, model)
    write(expected)
    assert outcome(model) == outcome(expected)


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_objects_that_refuse_it_stay_as_they_are(write):
    locked = []

    def check(self, error_msg):
        if locked:
            raise RuntimeError(error_msg())

    model = family(check)()
    before = outcome(model)
    locked.append(True)
    with pytest.raises(RuntimeError, match="Cannot mutate"):
        write(model)
    assert outcome(model) == before


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_the_check_of_the_base_class_is_that_of_the_trace(write):
    model = family(
        lambda self, error_msg: nnx.Module._check_valid_context(self, error_msg)
    )()
    before = outcome(model)
    with pytest.raises(nnx.errors.TraceContextError, match="Cannot mutate"):
        in_a_trace(write, model)
    assert outcome(model) == before
    write(model)
    assert outcome(model) != before


def test_a_check_may_come_and_go():
    class Model(nnx.Module):
        pass

    def write(model):
        model.a = 2

    model = Model()
    with pytest.raises(nnx.errors.TraceContextError):
        in_a_trace(write, model)
    Model._check_valid_context = lambda self, error_msg: None
    in_a_trace(write, model)
    assert model.a == 2
    del Model._check_valid_context
    with pytest.raises(nnx.errors.TraceContextError):
        in_a_trace(write, model)
    model._check_valid_context = lambda error_msg: None  # of this object alone
    in_a_trace(write, model)


def test_compiled_functions_see_what_was_allowed():
    model = family(lambda self, error_msg: None)()
    double = nnx.jit(lambda m, x: m.a * x, graph=True)
    assert [int(double(model, 3)) for _ in range(3)] == [3, 3, 3]
    in_a_trace(lambda m: setattr(m, "a", 5), model)
    assert int(double(model, 3)) == 15
