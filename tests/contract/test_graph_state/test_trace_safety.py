"""No tracer rests in an object; who may write what (contract sections 19 and 21)."""

import copy
import pickle

import jax
import jax.numpy as jnp
import pytest

import graftree as nnx
from graftree import errors
from graftree.core import ownership
from graftree.core.graph import flattening
from tests.strategies import Block, param

# Each runs a function of one array inside another trace.
TRACES = {
    "jit": lambda f: jax.jit(f)(jnp.ones(2)),
    "grad": lambda f: jax.grad(lambda x: (f(x), x.sum())[1])(jnp.ones(2)),
    "vmap": lambda f: jax.vmap(lambda x: (f(x), x)[1])(jnp.ones((3, 2))),
    "eval_shape": lambda f: jax.eval_shape(f, jnp.ones(2)),
    "scan": lambda f: jax.lax.scan(lambda c, x: (c, f(x)), 0, jnp.ones((3, 2))),
}
EACH_TRACE = pytest.mark.parametrize("trace", TRACES)


def model():
    return Block(
        a=param(),
        array=jnp.ones(2),
        held=nnx.data({"k": jnp.ones(2), "v": param()}),
        inner=nnx.List([param()]),
    )


def assert_untouched(m):
    leaves = jax.tree.leaves(m)
    assert len(leaves) == 5 and sorted(vars(m)) == sorted(vars(model()))
    for leaf in leaves:
        assert not isinstance(leaf, jax.core.Tracer) and leaf.tolist() == [1.0, 1.0]


WRITES = {
    "value": lambda m, x: m.a.set_value(x),
    "item": lambda m, x: m.a.__setitem__(..., x),
    "raw value": lambda m, x: m.a.set_raw_value(x),
    "attribute": lambda m, x: setattr(m, "array", x),
    "new attribute": lambda m, x: setattr(m, "new", x),
    "del": lambda m, x: delattr(m, "a"),
    "append": lambda m, x: m.inner.append(x),
    "metadata": lambda m, x: nnx.set_metadata(m, tag="x"),
    "update": lambda m, x: nnx.update(m, {"a": x}),
    "update an array": lambda m, x: nnx.update(m, {"array": x}),
    "update a dict": lambda m, x: nnx.update(m, {"held": {"k": x}}),
    "update a new key": lambda m, x: nnx.update(m, {"held": {"new": x}}),
    "update last": lambda m, x: nnx.update(m, {"array": x, "inner": {0: x}}),
    "pop": lambda m, x: nnx.pop(m, nnx.PathContains("a")),
    "pop held": lambda m, x: nnx.pop(m, nnx.PathContains("v")),
    "pop arrays": lambda m, x: nnx.pop(m, nnx.PathContains("array")),
}


@EACH_TRACE
@pytest.mark.parametrize("write", WRITES)
def test_captured_objects_are_not_written(trace, write):
    m = model()

    def f(x):
        with pytest.raises(errors.TraceContextError, match="Cannot mutate"):
            WRITES[write](m, x)

    TRACES[trace](f)
    assert_untouched(m)


@EACH_TRACE
def test_captured_objects_are_read(trace):
    m = model()

    def f(x):
        graphdef, state = nnx.split(m)
        merged = nnx.merge(graphdef, state)
        copied = nnx.clone(m)
        copied.a[...] = x
        copied.new = x
        nnx.update(copied, {"held": {"k": x}})
        nnx.pop(copied, nnx.PathContains("a"), nnx.PathContains("held"))
        merged.array = x
        assert len(list(nnx.iter_graph(m))) > 0
        return m.a[...] + m.array

    TRACES[trace](f)
    assert_untouched(m)


@EACH_TRACE
def test_merged_captured_variables_keep_their_trace(trace):
    m = model()
    graphdef, state = nnx.split(m)

    def f(x):
        merged = nnx.merge(graphdef, state)
        merged.new = x
        phrase = "Cannot mutate Param from a different trace level"
        with pytest.raises(errors.TraceContextError, match=phrase):
            merged.a[...] = x
        copied = nnx.merge(graphdef, state, copy=True)
        copied.a[...] = x
        raw = nnx.merge(graphdef, nnx.to_pure_dict(state))
        raw.a[...] = x

    TRACES[trace](f)
    assert_untouched(m)


@EACH_TRACE
@pytest.mark.parametrize(
    "remake",
    [
        nnx.clone,
        copy.deepcopy,
        lambda m: nnx.map(lambda path, x: x + 1, m),
        lambda m: jax.tree.map(lambda x: x, m),
        lambda m: nnx.merge(*nnx.split(m), copy=True),
        lambda m: pickle.loads(pickle.dumps(m)),
    ],
    ids=["clone", "deepcopy", "map", "tree.map", "merge", "pickle"],
)
def test_objects_made_inside_are_written_inside(trace, remake):
    m = model()

    def f(x):
        made = remake(m)
        for write in ("value", "attribute", "new attribute", "append", "update a dict"):
            WRITES[write](made, x)

    TRACES[trace](f)
    assert_untouched(m)


@EACH_TRACE
def test_ref_backed_variables_are_written_from_inside(trace):
    if trace in ("vmap", "eval_shape"):
        pytest.skip("JAX itself can't write a captured ref there")
    m = Block(a=nnx.Param(jnp.ones(()), ref=True))
    TRACES[trace](lambda x: nnx.update(m, {"a": jnp.zeros(())}))
    assert m.a[...] == 0.0


@EACH_TRACE
def test_objects_that_left_their_trace_can_t_be_written(trace):
    made = []
    TRACES[trace](lambda x: made.append(Block(a=nnx.Param(1))) or None)
    with pytest.raises(errors.TraceContextError):
        made[0].a.set_value(2)
    with pytest.raises(errors.TraceContextError):
        made[0].b = 3


def test_unflatten_into_captured_objects_is_refused():
    m, refs = model(), flattening.RefMap()
    nnx.flatten(m, ref_index=refs)
    known = flattening.IndexMap.from_refmap(refs)

    def f(x):
        graphdef, flat = nnx.flatten(m, ref_outer_index=refs)
        leaves = [x for _ in flat]
        with pytest.raises(errors.TraceContextError):
            nnx.unflatten(graphdef, leaves, outer_index_outer_ref=known)

    jax.jit(f)(jnp.zeros(2))
    assert_untouched(m)


# ------------------------------------------------------------------------- trace states


def test_trace_states():
    outer = ownership.TraceState()
    assert outer.is_valid() and outer == ownership.TraceState()
    assert jax.tree.leaves(outer) == []
    with pytest.raises(TypeError):
        hash(outer)
    assert pickle.loads(pickle.dumps(outer)).is_valid()


@EACH_TRACE
def test_trace_states_are_snapshots(trace):
    outer = ownership.TraceState()

    def f(x):
        inner = ownership.TraceState()
        assert inner.is_valid() and not outer.is_valid() and inner != outer
        assert jax.tree.map(lambda y: y, outer).is_valid()

    TRACES[trace](f)
    assert outer.is_valid()


def test_the_error_is_of_the_library_and_no_value_error():
    assert issubclass(errors.TraceContextError, errors.GraftreeError)
    assert not issubclass(errors.TraceContextError, ValueError)


# ---------------------------------------------------------------- idioms that must work


def test_shared_ref_variables_are_one_argument_of_jit():
    p = nnx.Param(jnp.ones(2), ref=True)
    graphdef, state = nnx.split(Block(a=p, b=p))

    @jax.jit
    def f(state):
        nnx.merge(graphdef, state).b[...] *= 3

    f(state)
    assert p[...].tolist() == [3.0, 3.0]
    assert nnx.find_duplicates(Block(a=p, b=p)) == [[("a",), ("b",)]]


def test_abstract_models_are_filled():
    abstract = jax.eval_shape(lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(1))
    pure = nnx.to_pure_dict(nnx.state(model))
    graphdef, state = nnx.split(abstract)
    nnx.replace_by_pure_dict(state, pure)
    merged = nnx.merge(graphdef, state)
    assert merged.kernel[...] is model.kernel[...]
    nnx.update(abstract, pure)
    assert abstract.kernel[...] is model.kernel[...]


def test_surgery():
    a, b = (nnx.Linear(2, 2, rngs=nnx.Rngs(seed)) for seed in range(2))
    m = Block(a=a, b=b)
    m.a.kernel = m.b.kernel
    assert list(nnx.state(m)["b"]) == ["bias"]
    m.a, m.b = m.b, m.a
    m.c = jax.nn.relu
    merged = nnx.merge(*nnx.split(m))
    assert merged.a.kernel is merged.b.kernel and merged.c is jax.nn.relu


def test_the_functional_loop():
    model, count = nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.Variable(jnp.array(0))
    graphdef, state = nnx.split((model, count))

    @jax.jit
    def step(state):
        model, count = nnx.merge(graphdef, state)
        model.bias[...] += 1
        count[...] += 1
        return nnx.state((model, count))

    for _ in range(3):
        state = step(state)
    assert count[...] == 0
    nnx.update((model, count), state)
    assert count[...] == 3 and model.bias[...].tolist() == [3.0, 3.0]
