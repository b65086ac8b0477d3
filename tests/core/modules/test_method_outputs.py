"""Outputs of methods, recorded by ``capture(method_outputs=)``."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx


class Block(nnx.Module):
    def __init__(self, scale=2.0):
        self.scale = nnx.Param(jnp.array(scale))

    def __call__(self, x):
        self.sow(nnx.Intermediate, "x", x)
        return self.scaled(x)

    def scaled(self, x):
        return self.scale[...] * x

    @staticmethod
    def offset(x):
        return x + 1

    @classmethod
    def make(cls):
        return cls()

    @property
    def double(self):
        return 2 * self.scale[...]

    def _private(self, x):
        return x


class Sub(Block):
    def helper(self, x):
        return self.offset(x) + self._private(self.double)


class Model(nnx.Module):
    def __init__(self):
        self.layers = nnx.List([Block(2.0), Block(3.0)])
        self.heads = nnx.Dict(a=Block(5.0))

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return {name: head(x) for name, head in self.heads.items()}


def outputs_of(fn, *args, **options):
    call = nnx.capture(fn, nnx.Intermediate, method_outputs=nnx.Intermediate, **options)
    return call(*args)[1]


def test_outputs_of_public_methods_are_recorded_under_their_name():
    seen = outputs_of(Block(), 1.0)
    assert {name: leaf.get_value() for name, leaf in seen.items()} == {
        "__call__": (2.0,),
        "scaled": (2.0,),
        "x": (1.0,),
    }


def test_outputs_of_inherited_methods_are_recorded():
    assert {"__call__", "scaled"} <= outputs_of(Sub(), 1.0).keys()


def test_outputs_of_overridden_methods_are_recorded_once():
    class Override(Block):
        def scaled(self, x):
            return super().scaled(x) + 1

    assert outputs_of(Override(), 1.0)["scaled"].get_value() == (3.0,)


def test_bound_method_does_not_record_itself():
    assert outputs_of(Block().__call__, 1.0).keys() == {"scaled", "x"}


def test_static_private_and_class_methods_and_properties_still_work():
    block = Sub()
    assert outputs_of(block.helper, 1.0).keys() == set()
    assert outputs_of(lambda block: block.make(), block).keys() == set()


def test_containers_do_not_record_their_machinery():
    seen = outputs_of(Model(), 1.0)
    assert seen["heads"].keys() == {"a"} and seen["layers"].keys() == {0, 1}


def test_method_outputs_need_not_be_returned():
    call = nnx.capture(Block(), nnx.Intermediate, method_outputs=nnx.BatchStat)
    result, seen = call(1.0)
    assert result == 2.0 and list(seen) == ["x"]


def test_method_outputs_go_through_transforms(mode):
    class Jitted(Block):
        @nnx.jit(**mode)
        def __call__(self, x):
            return self.scaled(x)

    seen = outputs_of(Jitted(), 1.0)
    assert seen["scaled"].get_value() == seen["__call__"].get_value() == (2.0,)


def test_classes_are_left_as_they_are():
    before = dict(vars(Block))
    outputs_of(Block(), 1.0)
    assert dict(vars(Block)) == before


def test_other_instances_of_the_class_do_not_record():
    other = Block()

    def f(model):
        assert type(model).__name__ == "Block" and isinstance(model, Block)
        assert type(other) is Block and "__captures__" not in vars(other)
        return other.scaled(1.0)

    assert not outputs_of(f, Block())


def test_subclass_hooks_of_the_user_are_not_run():
    class Registered(nnx.Module):
        def __init_subclass__(cls, *, key, **options):
            super().__init_subclass__(**options)
            cls.key = key

    class Entry(Registered, key=1):
        def __call__(self):
            return self.key

    assert outputs_of(Entry())["__call__"].get_value() == (1,)


def test_nested_calls_may_record_outputs_as_different_types():
    def inner(block):
        call = nnx.capture(block, nnx.Cache, method_outputs=nnx.Cache)
        return call(1.0)

    outer = nnx.capture(inner, nnx.Intermediate, method_outputs=nnx.Intermediate)
    block = Block()
    (_, cached), seen = outer(block)
    assert cached["scaled"].get_value() == seen["scaled"].get_value() == (2.0,)
    assert type(block) is Block and "__captures__" not in vars(block)


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
def test_capture_equals_that_of_a_peer():
    peer = pytest.importorskip("flax.nnx")

    def run(nnx):
        class Layer(nnx.Module):
            def __init__(self, scale):
                self.scale = nnx.Param(jnp.array(scale))

            def __call__(self, x):
                self.sow(nnx.Intermediate, "x", x)
                return self.perturb("y", self.scaled(x))

            def scaled(self, x):
                return self.scale[...] * x

        model = nnx.List([Layer(2.0), Layer(3.0)])

        def forward(model, x):
            for layer in model:
                x = layer(x)
            return x

        # In the other order the peer takes perturbations for intermediates.
        kinds = nnx.Perturbation, nnx.Intermediate
        call = nnx.capture(forward, *kinds, method_outputs=nnx.Intermediate)
        states = call(model, jnp.arange(2.0))[1:]
        return [
            (path, type(leaf).__name__, jax.tree.map(np.asarray, leaf.get_value()))
            for state in states
            for path, leaf in sorted(nnx.to_flat_state(state), key=str)
        ]

    assert str(run(nnx)) == str(run(peer))
