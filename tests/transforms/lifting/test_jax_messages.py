"""What JAX says speaks of the user's program: functions, lines, names of arguments."""

import contextlib
import functools
import os
import re
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import graftree as nnx
from tests import meshes, zoo

LIBRARY = os.path.dirname(nnx.__file__)


@pytest.fixture(autouse=True)
def as_users_see_it():
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "quiet_remove_frames")
    yield
    jax.config.update("jax_traceback_filtering", before)


def make_net():
    up = zoo.Box(bias=nnx.Param(jnp.ones(2)), kernel=nnx.Param(jnp.ones((2, 2))))
    return zoo.Box(blocks=nnx.List([zoo.Box(up=up)]))


def by_kernel(net, x, *rest, train=False, **others):
    return x if net.blocks[0].up.kernel.sum() > 0 else -x


@functools.wraps(by_kernel)
def decorated(*args, **kwargs):
    return by_kernel(*args, **kwargs)


def by_flag(net, x, *rest, train=False, **others):
    return x if train else -x


def by_rest(net, x, *rest, train=False, **others):
    return np.asarray(rest[0]["k"]) + x


def by_others(net, x, *rest, train=False, **others):
    return x * int(others["n"])


def by_input(x, net):
    return (x, x) if x.sum() > 0 else (-x, x)


def loss(net, x):
    return x.sum() if net.blocks[0].up.kernel.sum() > 0 else 0.0


def line_of(function):
    return f"{function.__name__} at {__file__}:{function.__code__.co_firstlineno}"


def make(x=np.ones(2, np.float32)):  # noqa: B008
    return make_net(), x


@contextlib.contextmanager
def told(kind, *words):
    """Expects an error that says all words.

    It and the traceback are about the user's program only.
    """
    with pytest.raises(kind) as error:
        yield error
    text = str(error.value)
    for internal in ("groups", "graftree/transforms", "graftree/core", "traced at"):
        assert internal not in text
    frames = traceback.extract_tb(error.value.__traceback__)
    assert not [x for x in frames if x.filename.startswith(LIBRARY)]
    assert [x for x in words if x not in text] == [], text


CONCRETE = {
    "jit": lambda: nnx.jit(by_kernel)(*make()),
    "jit beside a static": lambda: nnx.jit(by_kernel, static_argnums=1)(*make(3)),
    "partial": lambda: nnx.jit_partial(by_kernel, make_net(), graph=False)(jnp.ones(2)),
    "remat": lambda: nnx.remat(by_kernel)(*make()),
    "eval_shape": lambda: nnx.eval_shape(by_kernel, *make()),
    "grad in jit": lambda: nnx.jit(nnx.grad(loss))(*make()),
    "decorated": lambda: nnx.jit(decorated)(*make()),
    "function": lambda: nnx.jit(functools.partial(by_kernel, x=2.0))(make_net()),
}


@pytest.mark.parametrize("name", CONCRETE)
def test_values_that_are_not_known_have_the_name_of_the_argument(name):
    line = line_of(loss if "grad" in name else by_kernel)
    words = line, "the argument net.blocks[0].up.kernel."
    with told(jax.errors.TracerBoolConversionError, *words):
        CONCRETE[name]()


def test_methods_name_self():
    class Owner(zoo.Scale):
        @nnx.jit
        def __call__(self):
            return 1 if self.w > 0 else 2

    words = f"__call__ at {__file__}", "the argument self.w."
    with told(jax.errors.TracerBoolConversionError, *words):
        Owner()()


def go_on(state):
    return bool(state[1] < 3)


def body(value):
    return value if value[1] > 2 else (value[0], value[1] + 1)


def step(i, value):
    return value if i > value[1] else (value[0], value[1] + 1)


def is_small(state):
    return state[1] < 3


def steps(n):
    return nnx.fori_loop(0, n, step, make(1))[1]


def branch(x, net):
    return x * 2 if x > 0 else x


CALLS = {
    "keyword": (by_flag, "train", lambda: nnx.jit(by_flag)(*make(), train=True)),
    "places": (by_rest, "rest[0]['k']", lambda: nnx.jit(by_rest)(*make(), {"k": 1.0})),
    "keywords": (by_others, "others['n']", lambda: nnx.jit(by_others)(*make(), n=2)),
    "scan": (by_input, "x", lambda: nnx.scan(by_input)(jnp.ones(2), jnp.ones(3))),
    "while_cond": (go_on, "state[1]", lambda: nnx.while_loop(go_on, body, (0, 1))),
    "while_body": (body, "value[1]", lambda: nnx.while_loop(is_small, body, make(1))),
    "fori_loop": (step, "i and value[1]", lambda: nnx.fori_loop(0, 3, step, make(1))),
    "traced bounds": (step, "i and value[1]", lambda: jax.jit(steps)(3)),
    "cond": (branch, None, lambda: nnx.cond(True, branch, branch, 1.0, make_net())),
    "switch": (branch, None, lambda: nnx.switch(0, [branch, step], 1.0, make_net())),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_function_and_its_arguments_are_named(name):
    function, argument, call = CALLS[name]
    with told(jax.errors.JAXTypeError, line_of(function)) as error:
        call()
    if argument is not None:
        assert error.match(f"the arguments? {re.escape(argument)}\\.")


def test_the_function_of_a_mapped_value_is_shown_by_its_line():
    with told(jax.errors.TracerBoolConversionError, __file__):
        nnx.vmap(lambda net, x: 1 if x > 0 else 2, in_axes=(None, 0))(*make())


def apply(net, x):
    return x


MESH = meshes.mesh_of(a=2)
SPLIT = NamedSharding(MESH, P("a"))


def committed_apart():
    first, second, *_ = jax.devices()
    net = jax.device_put(make_net(), first)
    nnx.jit(apply, keep_unused=True)(net, jax.device_put(jnp.ones(2), second))


def set_bias(net, value):
    net.blocks[0].up.bias.set_value(value)


def sharded(*specs):
    return nnx.shard_map(apply, mesh=MESH, in_specs=specs, out_specs=P("a"))


# JAX 0.10 gives no name there.
IN_OLDEST = jax.__version_info__ < (0, 11) and ["implies that array axis 0"]

MISTAKES = {
    "sizes": (
        lambda: nnx.vmap(apply)(*make(jnp.ones(3))),
        ["argument net.blocks[0].up.bias of", "argument x of type float32[3]"],
    ),
    "out_axes": (
        lambda: nnx.vmap(lambda x: (x, [x]), out_axes=(0, None))(jnp.ones(3)),
        ["at vmap out_axes[1][0], got axis spec None"],
    ),
    "new values": (
        lambda: nnx.vmap(set_bias, in_axes=(None, 0))(*make()),
        ["out_axes(new net['blocks'][0]['up']['bias']), got axis spec None"],
    ),
    "type": (
        lambda: nnx.jit(apply)(make_net(), {"k": object()}),
        ["the function at path x['k']"],
    ),
    "output": (lambda: nnx.jit(lambda x: (x, object()))(1.0), ["component [1], which"]),
    "overflow": (lambda: nnx.jit(apply)(make_net(), 2**80), ["argument path is x."]),
    "compiled for": (
        lambda: nnx.jit(apply).lower(*make()).compile()(*make(jnp.ones(3))),
        ["Argument 'x' compiled with float32[2] and called with float32[3]"],
    ),
    "in_shardings": (
        lambda: nnx.jit(apply, in_shardings=(SPLIT, None))(zoo.Scale(jnp.ones(3)), 1.0),
        IN_OLDEST or ["pytree key path net.w was given the sharding"],
    ),
    "out_shardings": (
        lambda: nnx.jit(lambda x: (0, x), out_shardings=(None, SPLIT))(jnp.ones(3)),
        IN_OLDEST or ["pytree key path result[1] was given the sharding"],
    ),
    "devices": (committed_apart, ["Got argument net.blocks[0].up.", "argument x of"]),
    "carry": (
        lambda: nnx.scan(lambda total, x: (total + 0.5, x))(jnp.int32(1), jnp.ones(3)),
        ["carry at path total has type"],
    ),
    "shard_map": (
        lambda: sharded(P(), P("a"))(*make(jnp.ones(3))),
        ["axis 0 of size 3 is not evenly divisible by 2", "x: float32[3], by P"],
    ),
    "rank in shard_map": (
        lambda: sharded(P(None, "a"), P())(*make()),
        ["rank 1 is less than the 2 entries", "net.blocks[0].up.bias: float32[2]"],
    ),
    "branches": (
        lambda: nnx.cond(True, lambda x: (x, x), lambda x: (x, 1), 1.0),
        ["The output of true_fun at path out[1] has type"],
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_told_in_the_terms_of_the_call(name):
    call, expected = MISTAKES[name]
    with told((TypeError, ValueError, OverflowError), *expected):
        call()


def test_leaked_tracers_name_the_function():
    kept = []

    def leaking(x):
        kept.append(x * 2)
        return x

    nnx.jit(leaking)(1.0)
    with told(jax.errors.UnexpectedTracerError, line_of(leaking)) as error:
        kept[0] + 1
    assert LIBRARY not in str(error.value)


def test_lowered_programs_name_arguments_and_outputs():
    text = nnx.jit(lambda net, x: (x, [x])).lower(*make()).as_text(debug_info=True)
    assert 'loc("x")' in text and 'jax.result_info = "result[1][0]"' in text


def test_lowered_programs_name_new_attributes():
    def function(net, x):
        net.extra = nnx.Param(x)

    step = nnx.jit(function, graph=True, graph_updates=True)
    text = step.lower(*make()).as_text(debug_info=True)
    assert "(new net['extra'])" in text


def test_programs_name_arguments_and_locate_operations_at_the_user():
    def function(net, x):
        return net.blocks[0].up.bias * x

    jaxpr = nnx.jit(function).trace(*make()).jaxpr
    (equation,) = [x for x in jaxpr.eqns if x.primitive.name == "mul"]
    assert f"{__file__}:{function.__code__.co_firstlineno + 1}" in jaxpr.pretty_print(
        source_info=True
    )
    names = jaxpr.jaxpr.debug_info.arg_names
    assert names == ("net.blocks[0].up.bias", "net.blocks[0].up.kernel", "x")


def test_logs_of_compilation_name_what_is_compiled(caplog):
    with jax.log_compiles(True):
        nnx.scan(lambda total, x: (total + x, x))(0.0, jnp.ones(3))
        nnx.cond(True, lambda x: x, lambda x: -x, 1.0)
        nnx.jit(apply)(*make())
    text = caplog.text
    for name in ("jit(scan)", "jit(cond)", "jit(apply)"):
        assert f"Compiling {name} with" in text


def test_missed_caches_name_the_function_and_the_argument(caplog):
    jitted = nnx.jit(apply)
    with jax.explain_cache_misses(True):
        jitted(*make())
        jitted(*make(jnp.ones(3)))
    assert "at x, now f32[3] and before f32[2]" in caplog.text
    assert f"apply defined at {__file__}" in caplog.text
    assert "graftree/transforms" not in caplog.text


def test_errors_of_the_user_have_no_frames_of_ours():
    def inner(net, x):
        raise KeyError("mine")

    def outer(net, x):
        mapped = nnx.vmap(inner, in_axes=(None, 0))
        return nnx.grad(lambda net, x: mapped(net, x))(net, x)

    with told(KeyError) as error:
        nnx.jit(outer)(*make())
    names = [x.name for x in traceback.extract_tb(error.value.__traceback__)]
    assert names[-3:] == ["outer", "<lambda>", "inner"]


def test_all_frames_are_shown_where_jax_shows_its_own():
    jax.config.update("jax_traceback_filtering", "off")
    with pytest.raises(ZeroDivisionError) as error:
        nnx.jit(lambda: 1 / 0)()
    frames = traceback.extract_tb(error.value.__traceback__)
    assert [x for x in frames if x.filename.startswith(LIBRARY)]
