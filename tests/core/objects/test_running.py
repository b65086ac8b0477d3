"""Which object runs: in the names of operations, in errors, to observers."""

import abc
import contextlib
import copy
import dataclasses
import functools
import inspect
import pickle
import pydoc
import re
import sys
import threading
import traceback
import types
from collections.abc import Callable
from unittest import mock

import cloudpickle
import jax
import jax.numpy as jnp
import optax
import pytest

import graftree as nnx

# Only an observer hears how Python writes the path of a call.
from graftree.core.objects import observers


@pytest.fixture
def in_mode(mode):
    """Makes one of the three modes the default."""
    with (
        nnx.set_graph_mode(mode["graph"]),
        nnx.set_graph_updates(mode.get("graph_updates", False)),
    ):
        yield


def doubled(x):
    return 2 * x


@dataclasses.dataclass
class Activated(nnx.Module):
    act: Callable = lambda x: 2 * x
    doubled: Callable = doubled

    def __call__(self, x):
        return self.act(x)


class Attention(nnx.Module):
    def __init__(self, rngs):
        self.query = nnx.Linear(3, 3, rngs=rngs)

    def __call__(self, x):
        """Attends."""
        return self.query(x)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.attention = Attention(rngs)

    def __call__(self, x):
        return self.attention(x) + x

    @nnx.jit
    def compiled(self, x):
        return self.attention(x)

    @nnx.remat
    def recomputed(self, x):
        return self.attention(x)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        make = nnx.vmap(lambda key: Block(nnx.Rngs(key)))
        self.layers = make(jax.random.split(jax.random.key(0), 3))
        self.heads = nnx.data({"a": Block(rngs)})

    def __call__(self, x, use=None):
        return self.blocks[1](x) if use is None else use(self, x)

    def helper(self, x):
        return self.blocks[0](x)

    @nnx.debugging.named
    def known_helper(self, x):
        return self.blocks[0](x)


@functools.cache
def net():
    return Net(nnx.Rngs(0))


def scanned(net, x):
    def body(x, layer):
        return layer(x), None

    axes = (nnx.Carry, 0)
    return nnx.scan(body, in_axes=axes, out_axes=axes)(x, net.layers)[0]


def carried(net, x):
    return nnx.fori_loop(0, 2, lambda _, c: (c[0], c[0](c[1])), (net.blocks[0], x))[1]


def chosen(net, x):
    block = net.blocks[1]
    return nnx.cond(x.sum() > 0, lambda m, x: m(x), lambda m, x: -m(x), block, x)


def looped(net, x):
    def go_on(carry):
        return carry[1].sum() < 0

    return nnx.while_loop(go_on, lambda c: (c[0], c[0](c[1])), (net.blocks[1], x))[1]


WAYS = {
    "a call": (lambda net, x: net.blocks[0](x), ".blocks[0].attention.query"),
    "a deeper one": (lambda net, x: net.blocks[0].attention(x), ".blocks[0].attention"),
    "a dict": (lambda net, x: net.heads["a"](x), ".heads['a'].attention.query"),
    "a method": (lambda net, x: net.helper(x), ".blocks[0].attention.query"),
    "jit": (lambda net, x: net.blocks[0].compiled(x), ".blocks[0].attention.query"),
    "remat": (lambda net, x: net.blocks[1].recomputed(x), ".blocks[1].attention.query"),
    "grad": (
        lambda net, x: nnx.grad(lambda x, m: m(x).sum())(x, net.blocks[1]),
        ".blocks[1].attention.query",
    ),
    "vmap": (
        lambda net, x: nnx.vmap(lambda m, x: m(x), in_axes=(0, None))(net.layers, x),
        ".layers.attention.query",
    ),
    "scan": (scanned, ".layers.attention.query"),
    "fori_loop": (carried, ".blocks[0].attention.query"),
    "while_loop": (looped, ".blocks[1].attention.query"),
    "cond": (chosen, ".blocks[1].attention.query"),
    "made in the call": (
        lambda net, x: nnx.Linear(3, 3, rngs=nnx.Rngs(0))(x),
        ".<Linear>",
    ),
}


def seen_names(f, *args):
    """The paths of the calls in ``f``."""
    names = []

    def observer(frame, call):
        names.append(frame.name)
        return call()

    with observers.observed(observer, shows_methods=True):
        f(*args)
    return names


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
    assert names[0] == "Net"
    assert f"Net{path}" in names


def test_arguments_of_transforms_go_by_their_names(in_mode):
    @nnx.jit
    def predict(model, others, *rest, extra):
        x = jnp.ones((1, 3))
        return [m(x) for m in (model, others["a"], rest[0], extra)]

    models = [Net(nnx.Rngs(0)) for _ in range(4)]
    names = seen_names(
        lambda: predict(models[0], {"a": models[1]}, models[2], extra=models[3])
    )
    outermost = [name for name in names if ".blocks" not in name]
    assert outermost == ["model", "others['a']", "rest[0]", "extra"]


def test_a_shared_object_has_the_path_by_which_it_is_called():
    class Tied(nnx.Module):
        def __init__(self, block):
            self.encoder = Block(nnx.Rngs(0))
            self.encoder.attention = block.attention
            self.decoder = block

        def __call__(self, x):
            return self.decoder(self.encoder(x))

    names = seen_names(Tied(Block(nnx.Rngs(1))), jnp.ones((1, 3)))
    assert [name for name in names if name.endswith("attention")] == [
        "Tied.encoder.attention",
        "Tied.decoder.attention",
    ]


def test_other_methods_add_their_name_and_inherited_ones_nothing():
    class Derived(Net):
        def __call__(self, x):
            return self.encode(super().__call__(x))

        def encode(self, x):
            return self.blocks[0](x)

    names = seen_names(Derived(nnx.Rngs(0)), jnp.ones((1, 3)))
    assert [name for name in names if "blocks" not in name] == [
        "Derived",
        "Derived.encode",
    ]


def test_objects_put_in_place_during_a_call_are_found():
    class Lazy(nnx.Module):
        def __call__(self, x):
            self.first = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
            x = self.first(x)
            self.second = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
            return self.second(x)

    names = seen_names(Lazy(), jnp.ones((1, 3)))
    assert names == ["Lazy", "Lazy.first", "Lazy.second"]


# ---------------------------------------------------------------------- operations


def train_step(net, optimizer, x):
    def loss(net):
        return (net(x, scanned) * net(x)).sum()

    optimizer.update(net, nnx.grad(loss)(net))


def test_operations_carry_the_path_forward_and_backward(in_mode):
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    lowered = nnx.jit(train_step).lower(model, optimizer, jnp.ones((2, 3)))
    names = names_of_dots(lowered)
    assert len(names) == 5
    for name in names:
        assert re.search(r"net.*/(blocks\[1\]|layers)/attention/query/", name)
    assert any("transpose(jvp(net))" in name for name in names)


def test_operations_carry_the_path_under_plain_jit():
    names = names_of_dots(jax.jit(Net.known_helper).lower(net(), jnp.ones((2, 3))))
    path = "jit(known_helper)/Net/known_helper/blocks[0]/attention/query/dot_general"
    assert names == [path]


def test_a_method_without_a_name_adds_none_to_what_it_calls():
    def call(net, x):
        return net(x, Net.helper)

    x = jnp.ones((2, 3))
    (inside,) = names_of_dots(jax.jit(call).lower(net(), x))
    assert inside == "jit(call)/Net/blocks[0]/attention/query/dot_general"
    (alone,) = names_of_dots(jax.jit(Net.helper).lower(net(), x))
    assert alone == "jit(helper)/Block/attention/query/dot_general"
    # Another shape: compiled programs are kept whatever the names in them.
    x = jnp.ones((4, 3))
    (lifted,) = names_of_dots(nnx.jit(Net.helper).lower(net(), x))
    assert lifted == "jit(helper)/Net/blocks[0]/attention/query/dot_general"


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
    start = f"at Net{path}, a Linear\n  inputs: float32[2, 5]\n"
    note = note_of(net(), jnp.ones((2, 5)), use)
    assert note.startswith(start)
    assert "kernel Param float32[3, 3]" in note


def test_errors_tell_the_innermost_method():
    class Picky(nnx.Module):
        def __call__(self, x):
            return self.check(x, options={"a": [1, None]})

        def check(self, x, **options):
            raise RuntimeError("no")

    note = note_of(Picky(), jnp.ones(2))
    assert note.splitlines()[0] == "at Picky.check, a Picky"
    assert "{'options': {'a': [1, None]}}" in note


def test_errors_tell_the_path_below_methods_that_are_not_known():
    class Outer(nnx.Module):
        def __init__(self):
            self.net = net()

        def run(self, x):
            return self.net.helper(x)

    x = jnp.ones((2, 5))
    compiled = functools.partial(nnx.jit(lambda net, x: net.helper(x)), net())
    for f, start in (
        (net().helper, "Net"),
        (Outer().run, "Outer.net"),
        (compiled, "net"),
    ):
        path = f"{start}.blocks[0].attention.query"
        assert note_of(f, x).startswith(f"at {path}, a Linear")


def test_a_method_that_is_the_innermost_function_is_told_with_its_object():
    class Helper(nnx.Pytree):
        def check(self, x, *others, strict=False):
            raise RuntimeError("no")

    class Uses(nnx.Module):
        def __init__(self):
            self.parts = nnx.List([Helper()])

        def __call__(self, x):
            return self.parts[0].check(x, 1, strict=True)

    note = note_of(Uses(), jnp.ones(2))
    assert note.splitlines()[:4] == [
        "at Uses.parts[0].check, a Helper",
        "  x: float32[2]",
        "  strict: True",
        "  others: (1,)",
    ]


def test_tracebacks_show_the_users_functions_only():
    def names(error):
        return [frame.name for frame in traceback.extract_tb(error.__traceback__)]

    with pytest.raises(TypeError) as caught:
        net()(jnp.ones((2, 5)))
    shown = names(caught.value)
    assert shown[1:4] == ["__call__", "__call__", "__call__"]
    assert "run" not in shown
    with pytest.raises(TypeError, match="unexpected keyword argument 'typo'") as caught:
        net()(typo=1)
    assert len(names(caught.value)) == 1


def test_notes_pickle_as_text():
    with pytest.raises(TypeError) as caught:
        net()(jnp.ones((2, 5)))
    (note,) = pickle.loads(pickle.dumps(caught.value)).__notes__[:1]
    assert type(note) is str and note.startswith("at Net.blocks[1]")


def test_nothing_is_running_after_a_call_or_an_exception():
    seen = seen_names(net(), jnp.ones((2, 3)))
    for _ in range(2):
        with contextlib.suppress(TypeError):
            seen_names(nnx.jit(net()), jnp.ones((2, 5)))
        with contextlib.suppress(TypeError):
            net()(jnp.ones((2, 5)))
    before = [*seen]
    assert seen_names(net(), jnp.ones((2, 3))) == before == seen


# ------------------------------------------------------- methods stay what they are


def test_methods_look_as_they_were_written():
    signature = inspect.signature(Attention.__call__)
    assert [*signature.parameters] == ["self", "x"]
    assert Attention.__call__.__doc__ == "Attends."
    assert Attention.__call__.__qualname__ == "Attention.__call__"
    assert "return self.query(x)" in inspect.getsource(Attention.__call__)


def test_functions_in_a_class_body_are_values():
    # Issue 32, S0: `act` was called with the array for `self`.
    model, x = Activated(), jnp.ones(2)
    assert nnx.jit(lambda m, x: m(x))(model, x).tolist() == [2.0, 2.0]
    assert Activated.act(3) == 6
    assert Activated.doubled is doubled
    model.act = doubled
    assert pickle.loads(pickle.dumps(model)).doubled is doubled


def test_methods_recur_as_deep_as_without_a_module():
    class Chain(nnx.Module):
        def __init__(self, below):
            self.below = below

        def total(self):
            return 1 + (self.below.total() if self.below is not None else 0)

    chain = None
    for _ in range(600):
        chain = Chain(chain)
    assert chain.total() == 600


def test_what_stands_for_call_is_copied_and_mocked_as_a_function():
    call = Attention.__call__
    assert copy.copy(call) is call and copy.deepcopy([call])[0] is call
    assert dict(inspect.getmembers(Attention, inspect.isfunction))["__call__"] is call
    with mock.patch.object(Attention, "__call__", autospec=True) as mocked:
        Attention(nnx.Rngs(0))(1)
    mocked.assert_called_once()
    assert Attention.__call__ is call
    assert "__call__(self, x)" in pydoc.render_doc(Attention)

    class Abstract(nnx.Module):
        @abc.abstractmethod
        def __call__(self, x):
            raise NotImplementedError

    assert Abstract.__abstractmethods__ == {"__call__"}


def test_only_plain_methods_can_be_named():
    def generate(self):
        yield 1

    for wrong in (generate, property(generate), nnx.jit(lambda self: 1), 3):
        with pytest.raises(TypeError, match="named expects a method written with"):
            nnx.debugging.named(wrong)


def test_generators_stay_generators():
    class Source(nnx.Module):
        def items(self, n):
            yield from range(n)

        async def later(self):
            return 1

    assert inspect.isgeneratorfunction(Source.items)
    assert inspect.iscoroutinefunction(Source.later)
    assert [*Source().items(3)] == [0, 1, 2]


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
    assert type(copied) is types.FunctionType
    assert copied(Local(), 1) == 2
    Local.__call__ = copied
    assert seen_names(Local(), 1) == ["Local"]


def test_threads_have_paths_of_their_own():
    model, names = net(), []

    def other():
        names.extend(seen_names(lambda: model.helper(jnp.ones((1, 3)))))

    def use(net, x):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return net.helper(x)

    own = seen_names(model, jnp.ones((1, 3)), use)
    assert names[:2] == ["Net.helper", "Net.blocks[0]"]
    assert own[:2] == ["Net", "Net.helper"] and len(own) == len(names) + 1
