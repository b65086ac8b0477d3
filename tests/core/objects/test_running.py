"""Which object runs: in the names of operations, in errors, to observers."""

import abc
import contextlib
import copy
import functools
import inspect
import pickle
import pydoc
import re
import sys
import traceback
import types
from unittest import mock

import cloudpickle
import jax
import jax.numpy as jnp
import pytest

import graftree as nnx

# Only an observer hears how Python writes the path of a call.
from graftree.core.objects import methods
from tests import threads, zoo


class Attention(nnx.Module):
    def __init__(self, rngs=None):
        self.query = nnx.Linear(3, 3, rngs=rngs or nnx.Rngs(0))

    def __call__(self, x):
        """Attends."""
        return self.query(x)


class Block(nnx.Module):
    def __init__(self):
        self.attention = Attention()

    def __call__(self, x):
        return self.attention(x) + x

    @nnx.jit
    def compiled(self, x):
        return self.attention(x)

    @nnx.remat
    def recomputed(self, x):
        return self.attention(x)


class Net(nnx.Module):
    def __init__(self):
        self.blocks = nnx.List([Block() for _ in range(2)])
        self.layers = nnx.vmap(Block, axis_size=3)()
        self.heads = nnx.data({"a": Block()})

    def __call__(self, x, use=None):
        return self.blocks[1](x) if use is None else use(self, x)

    def helper(self, x):
        return self.blocks[0](x)

    @nnx.debugging.named
    def known_helper(self, x):
        return self.blocks[0](x)


@functools.cache
def net():
    return Net()


def scanned(net, x):
    axes = (nnx.Carry, 0)
    scan = nnx.scan(lambda x, layer: (layer(x), None), in_axes=axes, out_axes=axes)
    return scan(x, net.layers)[0]


def called(carry):
    block, x = carry
    return block, block(x)


def is_below(carry):
    return carry[1].sum() < 0


def negated(block, x):
    return -block(x)


def differ(net, x):
    return nnx.grad(lambda x, m: m(x).sum())(x, net.blocks[1])


# What is called in a call of the net, and the path of one of the calls.
WAYS = {
    "a call": (lambda net, x: net.blocks[0](x), ".blocks[0].attention.query"),
    "a deeper one": (lambda net, x: net.blocks[0].attention(x), ".blocks[0].attention"),
    "a dict": (lambda net, x: net.heads["a"](x), ".heads['a'].attention.query"),
    "a method": (lambda net, x: net.helper(x), ".blocks[0].attention.query"),
    "jit": (lambda net, x: net.blocks[0].compiled(x), ".blocks[0].attention.query"),
    "remat": (lambda net, x: net.blocks[1].recomputed(x), ".blocks[1].attention.query"),
    "grad": (differ, ".blocks[1].attention.query"),
    "vmap": (
        lambda net, x: nnx.vmap(lambda m, x: m(x), in_axes=(0, None))(net.layers, x),
        ".layers.attention.query",
    ),
    "scan": (scanned, ".layers.attention.query"),
    "fori_loop": (
        lambda net, x: nnx.fori_loop(0, 2, lambda _, c: called(c), (net.blocks[0], x)),
        ".blocks[0].attention.query",
    ),
    "while_loop": (
        lambda net, x: nnx.while_loop(is_below, called, (net.blocks[1], x)),
        ".blocks[1].attention.query",
    ),
    "cond": (
        lambda net, x: nnx.cond(x.sum() > 0, Block.__call__, negated, net.blocks[1], x),
        ".blocks[1].attention.query",
    ),
    "made in the call": (lambda net, x: Attention().query(x), ".<Linear>"),
}


def seen_names(f, *args):
    """The paths of the calls in ``f``."""
    names = []

    def observer(frame, call):
        names.append(frame.name)
        return call()

    with methods.observed(observer, shows_methods=True):
        f(*args)
    return names


def those_with(part, names, is_in=True):
    return [name for name in names if (part in name) is is_in]


def names_of_dots(lowered):
    # Some versions of JAX name the function too through which an operation is called.
    lines = lowered.compile().as_text().splitlines()
    return [
        re.search(r'op_name="([^"]*)"', line)[1].replace("jit(dot_general)/", "")
        for line in lines
        if " dot(" in line
    ]


# --------------------------------------------------------------------------- paths


@pytest.mark.parametrize("way", WAYS)
def test_calls_have_the_path_from_the_outermost_object(in_mode, way):
    use, path = WAYS[way]
    call = functools.partial(net(), use=use)
    names = seen_names(jax.eval_shape, call, jnp.ones((2, 3)))
    assert names[0] == "Net" and f"Net{path}" in names


def test_arguments_of_transforms_go_by_their_names(in_mode):
    @nnx.jit
    def predict(model, others, *rest, extra):
        return [m(jnp.ones((1, 3))) for m in (model, others["a"], rest[0], extra)]

    a, b, c, d = (Block() for _ in range(4))
    names = seen_names(lambda: predict(a, {"a": b}, c, extra=d))
    outermost = those_with(".attention", names, is_in=False)
    assert outermost == ["model", "others['a']", "rest[0]", "extra"]


def test_a_shared_object_has_the_path_by_which_it_is_called():
    class Tied(nnx.Module):
        def __init__(self):
            self.encoder, self.decoder = Block(), Block()
            self.encoder.attention = self.decoder.attention

        def __call__(self, x):
            return self.decoder(self.encoder(x))

    names = those_with("attention", seen_names(Tied(), jnp.ones((1, 3))))
    parts = ["encoder.attention", "decoder.attention"]
    assert those_with("query", names, is_in=False) == [f"Tied.{x}" for x in parts]


def test_an_object_with_two_names_has_the_path_that_iter_graph_gives_it():
    class Twice(nnx.Module):
        def __init__(self):
            self.second = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
            self.first = self.second

        def __call__(self, x):
            return self.second(x)

    model = Twice()
    assert (("first",), model.second) in [*nnx.iter_graph(model)]
    text = jax.jit(model).lower(jnp.ones(3)).as_text(debug_info=True)
    assert "Twice/first/" in text and "Twice/second/" not in text


def test_other_methods_add_their_name_and_inherited_ones_nothing():
    class Derived(Net):
        def __call__(self, x):
            return self.encode(super().__call__(x))

        def encode(self, x):
            return self.blocks[0](x)

    names = seen_names(Derived(), jnp.ones((1, 3)))
    assert those_with("blocks", names, is_in=False) == ["Derived", "Derived.encode"]


def test_objects_put_in_place_during_a_call_are_found():
    class Lazy(nnx.Module):
        def __call__(self, x):
            self.first = Attention().query
            x = self.first(x)
            self.second = Attention().query
            return self.second(x)

    assert seen_names(Lazy(), jnp.ones((1, 3))) == ["Lazy", "Lazy.first", "Lazy.second"]


# ---------------------------------------------------------------------- operations


def test_operations_carry_the_path_forward_and_backward(in_mode):
    @nnx.jit
    def train_step(net, x):
        return nnx.grad(lambda net: (net(x, scanned) * net(x)).sum())(net)

    names = names_of_dots(train_step.lower(net(), jnp.ones((2, 3))))
    assert len(names) == 5
    for name in names:
        assert re.search(r"net.*/(blocks\[1\]|layers)/attention/query/", name)
    assert any("transpose(jvp(net))" in name for name in names)


def test_operations_carry_the_path_under_plain_jit():
    def call(net, x):
        return net(x, Net.helper)

    # The last has another shape: compiled programs are kept whatever the names in them.
    for rows, lowered, path in (
        (2, jax.jit(Net.known_helper), "known_helper)/Net/known_helper/blocks[0]"),
        # A method without a name adds none to what it calls.
        (2, jax.jit(call), "call)/Net/blocks[0]"),
        (2, jax.jit(Net.helper), "helper)/Block"),
        (4, nnx.jit(Net.helper), "helper)/Net/blocks[0]"),
    ):
        names = names_of_dots(lowered.lower(net(), jnp.ones((rows, 3))))
        assert names == [f"jit({path}/attention/query/dot_general"]


def test_operations_go_without_if_the_flag_says_so():
    with nnx.config.temp_flip_flag("graftree_named_scopes", False):
        lowered = jax.jit(lambda net, x: net(x)).lower(net(), jnp.ones((2, 3)))
    assert names_of_dots(lowered) == ["jit(<lambda>)/dot_general"]


# -------------------------------------------------------------------------- errors


def note_of(f, *args):
    with pytest.raises(Exception) as caught:
        f(*args)
    notes = [note for note in caught.value.__notes__ if note.startswith("at ")]
    assert len(notes) == 1
    return notes[0]


@pytest.mark.parametrize("way", sorted(WAYS.keys() - {"a deeper one", "jit"}))
def test_errors_tell_where_and_what_was_given(way):
    use, path = WAYS[way]
    start = f"at Net{path}, a Linear\n  inputs: float32[2,5]\n"
    note = note_of(net(), jnp.ones((2, 5)), use)
    assert note.startswith(start) and "kernel Param float32[3,3]" in note


def test_errors_tell_the_path_below_methods_that_are_not_known():
    class Outer(nnx.Module):
        def __init__(self):
            self.net = net()

        def run(self, x):
            return self.net.helper(x)

    compiled = nnx.jit(lambda net, x: net.helper(x))
    for f, start in (
        (net().helper, "Net"),
        (Outer().run, "Outer.net"),
        (lambda x: compiled(net(), x), "net"),
    ):
        path = f"{start}.blocks[0].attention.query"
        assert note_of(f, jnp.ones((2, 5))).startswith(f"at {path}, a Linear")


def test_a_method_that_is_the_innermost_function_is_told_with_its_object():
    class Helper(nnx.Pytree):
        def check(self, x, *others, strict=False):
            raise RuntimeError("no")

    class Uses(zoo.Box):
        def __call__(self, x):
            return self.parts[0].check(x, 1, strict=True)

    note = note_of(Uses(parts=nnx.List([Helper()])), jnp.ones(2))
    told = "at Uses.parts[0].check, a Helper\n  x: float32[2]\n  strict: True\n"
    assert note.startswith(told + "  others: (1,)")


def test_tracebacks_show_the_users_functions_only():
    def names(error):
        return [frame.name for frame in traceback.extract_tb(error.__traceback__)]

    with pytest.raises(TypeError) as caught:
        net()(jnp.ones((2, 5)))
    assert names(caught.value)[1:4] == ["__call__"] * 3
    assert "run" not in names(caught.value)
    (note,) = pickle.loads(pickle.dumps(caught.value)).__notes__[:1]
    assert type(note) is str and note.startswith("at Net.blocks[1]")
    with pytest.raises(TypeError, match="unexpected keyword argument 'typo'") as caught:
        net()(typo=1)
    assert len(names(caught.value)) == 1


def test_nothing_is_running_after_a_call_or_an_exception():
    seen = seen_names(net(), jnp.ones((2, 3)))
    for call in 2 * [lambda x: seen_names(nnx.jit(net()), x), net()]:
        with contextlib.suppress(TypeError):
            call(jnp.ones((2, 5)))
    assert seen_names(net(), jnp.ones((2, 3))) == seen


# ------------------------------------------------------- methods stay what they are


def test_what_stands_for_call_is_copied_and_mocked_as_a_function():
    call = Attention.__call__
    assert copy.copy(call) is call and copy.deepcopy([call])[0] is call
    assert dict(inspect.getmembers(Attention, inspect.isfunction))["__call__"] is call
    with mock.patch.object(Attention, "__call__", autospec=True) as mocked:
        Attention()(1)
    mocked.assert_called_once()
    assert Attention.__call__ is call
    assert "__call__(self, x)" in pydoc.render_doc(Attention)
    abstract = {"__call__": abc.abstractmethod(lambda self, x: x)}
    assert type(nnx.Module)(
        "Abstract", (nnx.Module,), abstract
    ).__abstractmethods__ == {"__call__"}


def test_only_plain_methods_can_be_named():
    def generate(self):
        yield 1

    for wrong in (generate, property(generate), nnx.jit(lambda self: 1), 3):
        with pytest.raises(TypeError, match="named expects a plain function"):
            nnx.debugging.named(wrong)


def test_methods_travel_by_value():
    class Local(nnx.Module):
        def __call__(self, x):
            return x + 1

    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    try:
        copied = pickle.loads(cloudpickle.dumps(Local.__call__))
    finally:
        cloudpickle.unregister_pickle_by_value(module)
    assert type(copied) is types.FunctionType and copied(Local(), 1) == 2
    Local.__call__ = copied
    assert seen_names(Local(), 1) == ["Local"]


def test_threads_have_paths_of_their_own():
    names, x = [], jnp.ones((1, 3))

    def use(net, x):
        threads.run_in_threads(lambda: names.extend(seen_names(lambda: net.helper(x))))
        return net.helper(x)

    own = seen_names(net(), x, use)
    assert names[:2] == ["Net.helper", "Net.blocks[0]"]
    assert own[:2] == ["Net", "Net.helper"] and len(own) == len(names) + 1
