"""Classes of Pytrees: their bases and keywords (contract, section 12)."""

import abc
import typing
from typing import Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import pytest

import graftree as nnx
from tests import tables
from tests.zoo import Node

T = TypeVar("T")


def test_abstract_methods_are_enforced():
    class Abstract(nnx.Pytree):
        @abc.abstractmethod
        def f(self): ...

    assert issubclass(nnx.pytreelib.PytreeMeta, abc.ABCMeta)
    with pytest.raises(TypeError):
        Abstract()


def test_generic_classes_can_be_mixed_in():
    class Holder(Node, typing.Generic[typing.TypeVar("T")]):
        pass

    assert Holder[int](x=jnp.ones(2)).x.shape == (2,)


def test_unknown_class_keywords_are_refused():
    with pytest.raises(TypeError):

        class Wrong(nnx.Pytree, unknown=1):
            pass


def test_slots_are_refused():
    with pytest.raises(TypeError, match=r"Slotted(.|\n)*'a'"):

        class Slotted(nnx.Pytree):
            __slots__ = ("a",)

    class Empty(nnx.Pytree):
        __slots__ = ()

    Empty()


class WithSlots:
    __slots__ = ("cache",)


@tables.cases(
    "base, storage",
    (WithSlots, r"'cache',\), of WithSlots"),
    (dict, "dict"),
    (OSError, "OS"),
)
@tables.cases("pytree", True, False)
@tables.cases("is_first", True, False)
def test_bases_with_storage_of_their_own_are_refused(base, storage, pytree, is_first):
    bases = (base, nnx.Module) if is_first else (nnx.Module, base)
    with pytest.raises(TypeError, match=rf"class Net (.|\n)*{storage}(.|\n)*attribute"):
        type(nnx.Module)("Net", bases, {}, pytree=pytree)


@runtime_checkable
class Scaled(Protocol[T]):
    scale: float

    def __call__(self, x: T) -> T: ...


def test_a_module_may_implement_a_protocol_by_deriving_from_it(mode):
    class Net(nnx.Module, Scaled[jax.Array]):
        def __init__(self):
            self.scale = nnx.Param(jnp.array(2.0))

        def __call__(self, x):
            return self.scale * x

    class Abstract(nnx.Module, Scaled[jax.Array]):
        @abc.abstractmethod
        def other(self): ...

    net = Net()
    assert isinstance(net, Scaled) and isinstance(net, Net)
    assert not isinstance(nnx.Dropout(0.5), Net) and issubclass(Net, nnx.Module)
    assert nnx.jit(lambda net: net(jnp.array(3.0)), **mode)(net) == 6
    with pytest.raises(TypeError, match="abstract"):
        Abstract()


@pytest.mark.parametrize("base", [nnx.Pytree, nnx.Module, nnx.Object])
def test_classes_without_init_take_no_arguments(base):
    class Plain(base):
        pass

    for cls in (base, Plain):
        assert isinstance(cls(), base)
        with pytest.raises(TypeError):
            cls(1)
        with pytest.raises(TypeError):
            cls(a=1)


def test_hash_and_equality_are_by_identity():
    a, b = Node(x=1), Node(x=1)
    assert a == a and a != b and hash(a) == hash(a) and len({a, b}) == 2


def test_bookkeeping_comes_first_and_can_be_read_also_by_its_old_names():
    box = Node(x=1)
    assert list(vars(box)) == ["_pytree__nodes", "_pytree__state", "x"]
    state = box._pytree__state
    assert (state.initializing, state.is_setup) == (False, False)
    assert isinstance(state.trace_state, nnx.tracers.TraceState)
    nodes = box._pytree__nodes
    assert hash(nodes) is not None and dict(nodes) == {"x": False}
    with pytest.warns(DeprecationWarning):
        assert box._object__nodes is nodes
    with pytest.warns(DeprecationWarning):
        assert box._object__state is state
