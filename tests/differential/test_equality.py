"""Values that are equal and yet not the same are told apart, wherever one is a key.

Issue 12, §2 and §4: ``1``, ``True`` and ``1.0`` shared one compilation, and a static
attribute that was set to an equal value of another type kept the old one.

`tests/contract/test_transforms/test_aliasing.py` has what holds for arguments by
position and by name, and for attributes and metadata under `nnx.jit`.

At the end programs beside their peers: language models, and random programs.
"""

import dataclasses
import functools
import importlib.util
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from benchmarks import language_model_rows, libraries
from benchmarks.language_models import Setting
from examples.lm.model import Config
from tests import modes, zoo
from tests.differential import bodies, generator, running, vocabulary
from tests.differential.vocabulary import code, exact

# Each line holds values that are equal, or nearly.
LINES = [
    [eval(text, {**vars(vocabulary), "np": np}) for text in line]
    for line in bodies.ALIKE
]
ALIKE = pytest.mark.parametrize("values", LINES, ids=range(len(LINES)))
# Some of each kind, for rules that are tested with every transform.
SOME = [value for line in LINES for value in line[:2]]


def model_of(kind=None):
    return zoo.Box(p=nnx.Param(jnp.ones(())), kind=kind)


def tag(model):
    return code(model.p.get_metadata("tag"))


def check(call, values):
    """Asserts that a call with each value, forth and back, gives the value's number."""
    for value in [*values, *values[::-1]]:
        assert float(call(value)) == code(value), exact(value)


# What gives, of a function of a model, one that calls it through a transform.
INSIDE = {
    "cond": lambda f, mode: lambda model: nnx.cond(True, f, f, model, **mode),
    "jit of remat": lambda f, mode: nnx.jit(nnx.remat(f, **mode), **mode),
}
MAPS = {
    "grad": lambda f, mode: lambda model: nnx.value_and_grad(f, **mode)(model)[0],
    "vmap": lambda f, mode: nnx.vmap(
        f, in_axes=None, out_axes=None, axis_size=2, **mode
    ),
}
OUTSIDE = {"remat": lambda f, mode: nnx.remat(f, **mode), **MAPS, **INSIDE}


@ALIKE
def test_static_arguments_are_told_apart(values):
    check(nnx.jit(lambda *kinds: code(kinds[0]), static_argnums=(0,)), values)


@pytest.mark.parametrize("transform", OUTSIDE)
def test_static_attributes_set_outside_are_told_apart(mode, transform):
    model = model_of()
    f = OUTSIDE[transform](lambda model: jnp.float32(code(model.kind)), mode)

    def call(value):
        model.kind = value
        return f(model)

    check(call, SOME)


@pytest.mark.parametrize("transform", INSIDE)
def test_static_attributes_set_inside_arrive(transform):
    model = model_of()

    def call(value):
        def write(model):
            model.kind = value
            return jnp.float32(0)

        INSIDE[transform](write, modes.GRAPH_UPDATES)(model)
        return code(model.kind)

    check(call, SOME)


@pytest.mark.parametrize("transform", MAPS)
def test_metadata_is_told_apart_inside_and_outside(mode, transform):
    model = model_of()
    read = MAPS[transform](lambda model: jnp.float32(tag(model)), mode)

    def inside(value):
        def write(model):
            model.p.set_metadata(tag=value)
            return jnp.float32(0)

        MAPS[transform](write, mode)(model)
        return tag(model)

    def outside(value):
        model.p.set_metadata(tag=value)
        return read(model)

    check(inside, SOME)
    check(outside, SOME)


@ALIKE
def test_jax_jit_tells_static_attributes_and_metadata_apart(values):
    jitted = jax.jit(lambda model: jnp.float32(code(model.kind) + tag(model)))

    def call(value):
        model = model_of(value)
        model.p.set_metadata(tag=value)
        return jitted(model) / 2

    check(call, values)


@ALIKE
def test_remembered_structure_is_that_of_now(values):
    model = model_of()
    for value in [*values, *values[::-1]]:
        model.kind = value
        model.p.set_metadata(tag=value)
        for copy in (nnx.clone(model), nnx.merge(*nnx.split(model))):
            assert code(copy.kind) == tag(copy) == code(value)
        assert tag(nnx.state(model)) == code(value)


@ALIKE
def test_graphdefs_differ_where_static_values_do(values):
    graphdefs = [(value, nnx.graphdef(model_of(value))) for value in values]
    for one, other in itertools.product(graphdefs, repeat=2):
        if one is other or exact(one[0]) != exact(other[0]):
            assert (one[1] == other[1]) == (one is other), (one[0], other[0])


# ---------------------------------------------------------------------- language models

CONFIG = Config(vocabulary=64, layers=1, width=32, heads=4, kv_heads=2, hidden=48)
ONE_DEVICE, DIVIDED = "one device, unrolled", "fsdp=8, a Stack"
LAYOUTS = {
    ONE_DEVICE: (CONFIG, ()),
    DIVIDED: (dataclasses.replace(CONFIG, stacked=True), (("fsdp", 8),)),
}
in_all_layouts = pytest.mark.parametrize("layout", LAYOUTS)


@functools.cache
def five_steps(library, layout):
    """The losses of five steps, and the bytes of temporaries in one."""
    setting = Setting(*LAYOUTS[layout], batch=8, length=16)
    # The program by hand broadcasts, as one does where it is allowed.
    with jax.numpy_rank_promotion("allow"):
        step = language_model_rows.new_step(library, setting)
        compiled = step.lower().compile()
        losses = [float(step()) for _ in range(5)]
    return losses, compiled.memory_analysis().temp_size_in_bytes


def of_both(peer, layout):
    """What `five_steps` gives for our model and for another: losses, then bytes."""
    return zip(
        *(five_steps(x, layout) for x in (libraries.GRAFTREE, peer)), strict=True
    )


@pytest.mark.long
@in_all_layouts
def test_losses_are_those_of_the_program_by_hand(layout):
    (ours, by_hand), _ = of_both(libraries.RAW, layout)
    np.testing.assert_allclose(ours, by_hand, rtol=0, atol=1e-6)
    assert ours[0] > ours[-1]


# On one device: divided, with the few optimizations of tests, they are further apart.
@pytest.mark.long
def test_temporaries_are_at_most_a_hundredth_more_than_by_hand():
    _, (ours, by_hand) = of_both(libraries.RAW, ONE_DEVICE)
    assert 0 < ours <= 1.01 * by_hand


@pytest.mark.long
@pytest.mark.peers
@pytest.mark.skipif(not importlib.util.find_spec("flax"), reason="compares with Flax")
@in_all_layouts
def test_losses_are_those_of_flax(layout):
    (ours, flax), _ = of_both(libraries.FLAX, layout)
    np.testing.assert_allclose(ours, flax, rtol=0, atol=1e-6)


# ---------------------------------------------------------------------- random programs

LONG = pytest.mark.long
LATER = [pytest.param(seed, marks=LONG) for seed in range(103, 130)]
SEEDS = [*range(9), *(pytest.param(seed, marks=LONG) for seed in range(9, 50))]


def check_program(seed, find):
    program = generator.make(seed)
    mode = program.modes[seed % len(program.modes)]
    found = find(program, mode)
    if found:
        smaller = running.shrunk(program, mode, find)
        pytest.fail(f"{found[2]}\n\n{smaller.script(mode)}", pytrace=False)


@pytest.mark.parametrize("seed", SEEDS)
def test_program_means_what_it_means_in_plain_python(seed):
    check_program(seed, running.difference)


@pytest.mark.parametrize("seed", [100, 101, 102, *LATER])
def test_program_means_the_same_without_what_is_remembered(seed):
    check_program(seed, running.difference_of_caches)
