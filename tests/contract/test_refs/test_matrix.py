"""Models in array refs, through every transform in every mode it has; hijax.

The rows are those of the other matrix. Where a row there differentiates its objects or
gives them no axis, which refs can't have, there is another one here.
"""

import copy
import dataclasses
import functools
import itertools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import graftree as nnx
from tests.comparisons import raises
from tests.contract.test_transforms import matrix
from tests.contract.test_transforms.matrix import MESH, SPEC, X, flat
from tests.zoo import Box

RETURNED = "mutable array references cannot be returned"


def beside(body):
    """A function that can be differentiated by a number beside the objects."""
    return lambda number, *args: (number**2, body(*args))


def derived(derive, f, args, mode):
    return derive(beside(f), has_aux=True, **mode)(1.0, *args)


BESIDE = {
    "grad": lambda *call: derived(nnx.grad, *call)[1],
    "value_and_grad": lambda *call: derived(nnx.value_and_grad, *call)[0][1],
}
ROWS = {
    name: dataclasses.replace(row, call=BESIDE.get(name, row.call))
    for name, row in matrix.ROWS.items()
    if name not in ("vjp", "jvp", "pmap", "shard_map", "vmap broadcast")
}
# What changes nothing, and what runs the function without making a program of it.
DETACHED = ("eval_shape", "make_jaxpr")
EAGER = ("grad", "value_and_grad", "custom_vjp", "vmap", "transform_metadata")
# The body gets elements, not the arrays of the caller.
MAPPED = ("vmap", "scan")


cases = functools.partial(matrix.cases, rows=ROWS)


def ref_param():
    return nnx.Param(jnp.array([1.0, 2.0]), ref=True)


def model():
    return Box(w=ref_param(), inner=nnx.Dict(b=ref_param()), array=jnp.ones(2))


def add_one(model, x):
    model.w[...] += 1
    return model.w * x


def is_detached(case):
    return case.row.transform in DETACHED


def is_eager(case):
    return case.row.transform in EAGER


def check(case, model):
    """Asserts that one was added once, unless the row changes nothing."""
    expected = [1.0, 2.0] if is_detached(case) else [2.0, 3.0]
    assert model.w[...].tolist() == expected


# ------------------------------------------------------------------- writes and reads


@cases()
def test_a_write_reaches_the_caller_once(case):
    m = model()
    ref, metadata = m.w.get_raw_value(), m.w.get_metadata()
    out = case(add_one, m)
    check(case, m)
    assert m.w.get_raw_value() is ref and m.w.get_metadata() == metadata
    assert m.inner.b[...].tolist() == [1.0, 2.0]
    assert not matrix.tracers_in(m)
    if case.row.has_output and not is_detached(case):
        assert flat(out) == [20.0, 60.0]


@cases()
def test_what_is_only_read_stays(case):
    m = model()
    before = matrix.facts(case, m)
    out = case(lambda model, x: model.w * x, m)
    assert matrix.facts(case, m) == before
    if case.row.has_output and not is_detached(case):
        assert flat(out) == [10.0, 40.0]


@cases()
def test_a_bare_ref_is_written_too(case):
    ref = jax.new_ref(jnp.array([1.0, 2.0]))

    def body(ref, x):
        ref[...] += x
        return x

    case(body, ref)
    assert ref[...].tolist() == ([1.0, 2.0] if is_detached(case) else [11.0, 22.0])


@cases(without=("compiled", "vmap", "scan"))
def test_what_is_captured_may_be_written(case):
    m = model()
    case(lambda x: add_one(m, x))
    check(case, m)


def test_a_compiled_function_writes_what_it_captured():
    m = model()
    compiled = nnx.jit(lambda x: add_one(m, x)).lower(X).compile()
    assert m.w[...].tolist() == [1.0, 2.0]
    assert compiled(X).tolist() == [20.0, 60.0]
    assert m.w[...].tolist() == [2.0, 3.0]


# --------------------------------------------------------------------- layers and steps


@cases(without=MAPPED)
def test_layers_and_optimizers_keep_their_state(case):
    with nnx.var_defaults(ref=True):
        layers = Box(
            rngs=nnx.Rngs(0),
            bn=nnx.BatchNorm(2, momentum=0.5, rngs=nnx.Rngs(0)),
            dropout=nnx.Dropout(0.5, rngs=nnx.Rngs(0)),
            kernel=nnx.Param(jnp.ones((2, 2))),
        )
        optimizer = nnx.Optimizer(layers, optax.sgd(0.5), wrt=nnx.Param)
    gradient = nnx.to_arrays(nnx.state(layers, nnx.Param))
    batch = jnp.array([[0.0, 2.0], [4.0, 6.0]])

    def body(layers, optimizer, x):
        layers.dropout(layers.bn(batch))
        layers.rngs()
        optimizer.update(layers, gradient)
        return x

    case(body, layers, optimizer)
    done = 0 if is_detached(case) else 1
    assert layers.rngs.default.count[...] == done
    assert layers.dropout.rngs.count[...] == done
    assert optimizer.step[...] == done
    # Half of the mean of the batch, and a step of half the gradient: the value itself.
    assert layers.bn.mean[...].tolist() == [done * 1.0, done * 2.0]
    assert (layers.kernel[...] == 1 - done * 0.5).all()
    assert not matrix.tracers_in((layers, optimizer))


@pytest.mark.parametrize("name", MAPPED)
def test_stacked_streams_draw_as_each_alone(name, mode):
    with nnx.var_defaults(ref=True):
        rngs = nnx.Rngs(0).split(2)
    keys = rngs.default.key[...]

    def draw(rngs, x):
        return rngs.normal(()) + 0 * x

    for count in range(2):
        draws = ROWS[name].call(draw, (rngs, X), mode)
        expected = [jax.random.normal(jax.random.fold_in(k, count)) for k in keys]
        np.testing.assert_allclose(draws, expected, rtol=1e-6)
    assert rngs.default.count[...].tolist() == [2, 2]


# ------------------------------------------------------------------------------ aliases


@cases(modes=("graph_updates", "graph"), without=("eval_shape", "custom_vjp"))
def test_one_ref_in_two_arguments_is_one_inside(case):
    m = model()

    def body(first, second, x):
        assert first.w is second.w
        first.w[...] += 1
        second.w[...] *= 10
        return first.w * x

    out = case(body, m, Box(w=m.w))
    expected = [1.0, 2.0] if is_detached(case) else [20.0, 30.0]
    assert m.w[...].tolist() == expected
    if case.row.has_output:
        assert flat(out) == [200.0, 600.0]


# Loops name the two places by the names of their own arguments.
@cases(modes=("tree",))
def test_a_tree_may_not_have_one_ref_twice(case):
    m = model()
    before = matrix.facts(case, m)
    with pytest.raises(ValueError, match="Duplicate Param") as caught:
        case(lambda first, second, x: x, m, Box(w=m.w))
    paths = [line for line in str(caught.value).splitlines() if line[:4] == "  - "]
    assert len(paths) == 2 and all(path.endswith(".w") for path in paths)
    assert matrix.facts(case, m) == before


# ------------------------------------------------------------------------------ outputs


FIXED = tuple(name for name, row in ROWS.items() if row.is_fixed)


@cases(modes=("graph_updates",), without=(*FIXED, "eval_shape"))
def test_an_input_comes_back_as_itself(case):
    m = model()
    ref = m.w.get_raw_value()
    out = case(lambda model, x: (model.w, {"all": model}), m)
    assert out[0] is m.w and out[1]["all"] is m and m.w.get_raw_value() is ref


@cases(modes=matrix.PLAIN, without=(*FIXED, "make_jaxpr"))
def test_an_input_may_not_be_returned_without_graph_updates(case):
    m = model()
    before = matrix.facts(case, m)
    with raises(ValueError, "Duplicate Param", "  - .out"):
        case(lambda model, x: model.w, m)
    assert matrix.facts(case, m) == before


OUTPUT = tuple(name for name, row in ROWS.items() if not row.has_output)


SCANS = "scan broadcast", "scan carry"


@cases(modes=("graph_updates",), without=(*OUTPUT, *DETACHED, *SCANS))
def test_a_new_ref_leaves_with_graph_updates(case):
    out = case(lambda x: Box(w=nnx.Param(x, ref=True), bare=jax.new_ref(x)))
    assert isinstance(out.w.get_raw_value(), jax.Ref) and isinstance(out.bare, jax.Ref)
    assert flat(out.w) == flat(out.bare[...]) == [10.0, 20.0]
    out.w[...] += 1
    assert flat(out.w) == [11.0, 21.0]


@cases(modes=matrix.PLAIN, without=(*OUTPUT, *DETACHED, "custom_vjp"))
def test_a_new_ref_leaves_no_program_without_graph_updates(case):
    def body(x):
        return {"made": Box(w=nnx.Param(x, ref=True))}

    if is_eager(case):
        out = case(body)["made"]
        assert isinstance(out.w.get_raw_value(), jax.Ref)
        assert flat(out.w) == [10.0, 20.0]
        return
    with raises(ValueError, ".out", "['made'].w", RETURNED, "nnx.to_arrays"):
        case(body)


def test_the_error_for_a_new_ref_has_its_path(value_mode):
    def make():
        with nnx.var_defaults(ref=True):
            return nnx.Dict(bn=nnx.BatchNorm(2, rngs=nnx.Rngs(0)))

    with raises(ValueError, "nnx.jit", ".out.bn.bias", RETURNED):
        nnx.jit(make, **value_mode)()


def test_a_new_model_of_refs_leaves_jit_without_objects_among_the_inputs():
    with nnx.var_defaults(ref=True):
        made = nnx.jit(lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(0)))()
    assert isinstance(made.kernel.get_raw_value(), jax.Ref)
    assert made(jnp.ones((1, 2))).shape == (1, 3)


# --------------------------------------------------------------------------- exceptions


@cases()
def test_an_exception_leaves_no_tracer(case):
    m = model()
    ref = m.w.get_raw_value()

    def fails(model, x):
        model.w[...] += 1
        raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"):
        case(fails, m)
    # Without a program to drop, the write was done before the exception.
    expected = [[1.0, 2.0], [2.0, 3.0]][: 1 + is_eager(case)]
    assert m.w.get_raw_value() is ref and ref[...].tolist() in expected
    assert not matrix.tracers_in(m)
    m.w[...] = jnp.array([1.0, 2.0])
    case(add_one, m)
    check(case, m)


# ------------------------------------------------------------------- what JAX can't do


def message(error):
    """All that is printed of an error."""
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


def stacked(model):
    """The same refs, with one more axis in front."""
    return jax.tree.map(lambda x: jax.new_ref(x[...][:, None]), model)


def over_x(f, mode):
    return nnx.vmap(f, in_axes=(None, 0), **mode)


def in_scan(model, x):
    return nnx.scan(add_one, in_axes=0, out_axes=0)(model, x[None])


def in_cond(model, x):
    return nnx.cond(x[0] > 0, add_one, add_one, model, x)


REFUSED = {x: (matrix.ROWS[x].call, add_one) for x in ("grad", "pmap", "shard_map")} | {
    "vmap broadcast": (lambda f, x, mode: over_x(f, mode)(*x), add_one),
    "vmap of cond": (lambda f, x, mode: over_x(f, mode)(x[0], X[:, None]), in_cond),
    "vmap of scan": (lambda f, x, mode: nnx.vmap(f, **mode)(stacked(x[0]), X), in_scan),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_not_be_done_is_an_error_that_tells_the_way_out(name, mode):
    call, body = REFUSED[name]
    m = model()
    with pytest.raises(Exception) as caught:
        call(body, (m, X), mode)
    assert "nnx.to_arrays" in message(caught.value)
    assert m.w[...].tolist() == [1.0, 2.0] and not matrix.tracers_in(m)


def test_shard_map_under_jit_takes_refs(mode):
    sharding = jax.sharding.NamedSharding(MESH, SPEC)
    w = nnx.Param(jax.device_put(jnp.array([1.0, 2.0]), sharding), ref=True)
    m = Box(w=w)
    f = nnx.shard_map(add_one, mesh=MESH, in_specs=SPEC, out_specs=SPEC, **mode)
    assert jax.jit(f)(m, jax.device_put(X, sharding)).tolist() == [20.0, 60.0]
    assert m.w[...].tolist() == [2.0, 3.0]


def test_a_broadcast_ref_is_read_in_vmap():
    m = model()
    out = nnx.vmap(lambda m, x: m.w * x, in_axes=(None, 0))(m, jnp.arange(3.0)[:, None])
    assert out[2].tolist() == [2.0, 4.0]


# ------------------------------------------------------------------------------ nesting


# Called as outer(call, mode), where call(model, x) gives the output.
OUTER = {
    "jax.jit": lambda call, mode: jax.jit(call),
    "jax.grad": lambda call, mode: beside_of(jax.grad, call, {}),
    "jax.vmap": lambda call, mode: widened(jax.vmap(call)),
    "jit": lambda call, mode: nnx.jit(call, **mode),
    "grad": lambda call, mode: beside_of(nnx.grad, call, mode),
    "vmap": lambda call, mode: widened(nnx.vmap(call, **mode)),
    "scan": lambda call, mode: widened(nnx.scan(call, in_axes=0, out_axes=0, **mode)),
}
INNER = ("jit", "grad", "remat", "vmap", "scan", "scan broadcast", "fori_loop", "cond")
# For JAX.
IMPOSSIBLE = [*itertools.product(("jax.vmap", "vmap"), ("cond", "scan"))]


def beside_of(grad, call, mode):
    derive = grad(beside(call), has_aux=True, **mode)
    return lambda model, x: derive(1.0, model, x)[1]


def widened(call):
    """A mapped call with one more axis, of length one, in front of all."""

    def with_axis(model, x):
        def wider(x):
            return jax.new_ref(x[...][None]) if isinstance(x, jax.Ref) else x[None]

        refs = jax.tree.map(wider, model)
        out = call(refs, x[None])
        model.w[...] = refs.w[...][0]
        return out

    return with_axis


NESTED = [pair for pair in itertools.product(OUTER, INNER) if pair not in IMPOSSIBLE]


@pytest.mark.parametrize(("outer", "inner"), NESTED)
def test_transforms_nest(outer, inner, mode):
    m, row = Box(w=ref_param()), ROWS[inner]
    call = lambda model, x: row.call(add_one, (model, x), mode)  # noqa: E731
    out = OUTER[outer](call, mode)(m, X)
    assert m.w[...].tolist() == [2.0, 3.0] and not matrix.tracers_in(m)
    if row.has_output:
        assert flat(out) == [20.0, 60.0]


# -------------------------------------------------------------------------------- hijax

HijaxVariable = nnx.variablelib.HijaxVariable
ImmutableVariableError = nnx.errors.ImmutableVariableError
COMBINATIONS = [*itertools.product([False, True], repeat=2)]


def hi(value=None, **metadata):
    value = jnp.array([1.0, 2.0]) if value is None else value
    return nnx.Param(value, hijax=True, **metadata)


def increment(variable):
    variable[...] += 1


def test_it_is_a_hijax_variable_of_its_declared_type():
    variable = hi()
    assert isinstance(variable, HijaxVariable) and isinstance(variable, nnx.Param)
    assert not isinstance(variable, nnx.BatchStat)
    assert variable.hijax and variable.var_type is nnx.Param
    assert not isinstance(nnx.Param(1), HijaxVariable)
    assert not isinstance(jnp.ones(2), HijaxVariable)


def test_it_is_so_within_a_trace_too():
    seen = []

    def f(v):
        seen.extend(isinstance(v, kind) for kind in (HijaxVariable, nnx.Param))
        seen.extend([v.hijax, v.var_type, v.shape, v.tag, v.has_metadata("tag")])
        seen.extend([str(v), repr(v)])

    jax.jit(f)(hi(tag="x"))
    assert seen[:-2] == [True, True, True, nnx.Param, (2,), "x", True]
    assert all("Param" in text and "hijax=True" in text for text in seen[-2:])


@pytest.mark.parametrize(("hijax", "ref"), COMBINATIONS)
def test_all_combinations_are_made_and_reported(hijax, ref):
    entries = {"hijax": hijax, "ref": ref}
    for variable in (
        nnx.Param(jnp.ones(2), **entries),
        nnx.Param.from_metadata(jnp.ones(2), entries),
        nnx.Param(jnp.ones(2)).copy(**entries),
        nnx.Param(jnp.ones(2), hijax=not hijax, ref=not ref).copy(**entries),
        nnx.with_vars(nnx.Param(jnp.ones(2)), **entries),
        copy.deepcopy(nnx.Param(jnp.ones(2), **entries)),
        pickle.loads(pickle.dumps(nnx.Param(jnp.ones(2), **entries))),
    ):
        assert (variable.hijax, variable.ref, variable.has_ref) == (hijax, ref, ref)
        assert isinstance(variable, HijaxVariable) is hijax
        assert variable[...].tolist() == [1.0, 1.0]


def test_the_api_of_variables_works():
    variable = hi(tag="x")
    variable[...] += 1
    variable[0] = 0.0
    assert variable.get_value().tolist() == [0.0, 3.0]
    assert (variable * 2).tolist() == [0.0, 6.0] and variable.shape == (2,)
    variable.set_metadata(tag="y", other=1)
    variable.del_metadata("other")
    assert variable.tag == "y" and not variable.has_metadata("other")
    variable.update_from_state(nnx.Param(jnp.zeros(2)))
    assert variable.hijax and variable[...].tolist() == [0.0, 0.0]
    with pytest.raises(NotImplementedError, match="get_value"):
        variable.value


def test_values_may_be_pytrees():
    variable = hi((jnp.array(1.0), jnp.array(2.0)))
    assert variable[0] == 1.0
    assert jax.jit(lambda v: v[0] + v[1])(variable) == 3.0
    grads = jax.grad(lambda v: v[0] ** 2 + 3 * v[1])(hi((2.0, 1.0)))
    assert isinstance(grads, nnx.Param) and grads.get_value() == (4.0, 3.0)


# ------------------------------------------------------------------ inside transforms


LOST = {
    "jit": jax.jit(increment),
    "closure": lambda v: jax.jit(lambda: increment(v))(),
    "grad": lambda v: jax.grad(lambda v: increment(v) or v[...].sum())(v),
    "grad closure": lambda v: jax.grad(lambda x: increment(v) or x)(1.0),
    "scan": lambda v: jax.lax.scan(lambda c, _: increment(v) or (c, 0), 0, length=2),
    "carry": lambda v: jax.lax.scan(lambda v, _: increment(v) or (v, 0), v, length=2),
    "set": jax.jit(lambda v: v.set_value(0)),
    "metadata": jax.jit(lambda v: v.set_metadata(tag="x")),
    "update": jax.jit(lambda v: nnx.update(v, jnp.zeros(2))),
    "model": lambda v: jax.jit(lambda m: nnx.update(m, {"a": 0.0}))(nnx.Dict(a=v)),
}


@pytest.mark.parametrize("call", LOST.values(), ids=LOST)
def test_writes_that_would_be_lost_are_errors(call):
    variable = hi()
    with pytest.raises(ImmutableVariableError, match="ref=True"):
        call(variable)
    assert variable[...].tolist() == [1.0, 2.0]
    increment(variable)
    assert variable[...].tolist() == [2.0, 3.0]


@pytest.mark.parametrize("ref", [False, True])
def test_what_is_made_inside_is_written_inside(ref):
    def f(x):
        variable = nnx.Param(x, hijax=True, ref=ref)
        increment(variable)
        return variable[...]

    assert jax.jit(f)(1.0) == 2.0


def test_with_a_ref_or_by_lifted_jit_writes_propagate():
    in_ref, variable = hi(ref=True), hi()
    jax.jit(increment)(in_ref)
    jax.jit(lambda: increment(in_ref))()
    assert in_ref[...].tolist() == [3.0, 4.0]
    nnx.jit(increment)(variable)
    assert variable[...].tolist() == [2.0, 3.0] and variable.hijax


def test_it_is_returned_from_jit():
    made = jax.jit(lambda: hi(tag="x"))()
    same = jax.jit(lambda v: v)(made)
    for variable in (made, same):
        assert isinstance(variable, HijaxVariable) and variable.tag == "x"
        increment(variable)  # eager again
    assert made[...].tolist() == same[...].tolist() == [2.0, 3.0]


def test_aliases_are_allowed():
    variable = hi()
    model = nnx.Dict(a=variable, b=variable)
    total = jax.jit(lambda m, v: m.a[...] + m.b[...] + v[...])(model, variable)
    assert total.tolist() == [3.0, 6.0]


@pytest.mark.parametrize("grad", [jax.grad, nnx.grad])
def test_gradients_have_the_same_type(grad):
    grads = grad(lambda v: (v[...] ** 2).sum())(hi(tag="x"))
    assert isinstance(grads, HijaxVariable) and isinstance(grads, nnx.Param)
    assert grads[...].tolist() == [2.0, 4.0] and grads.tag == "x"


def test_it_may_be_captured_or_not_differentiated():
    variable = hi()
    assert jax.grad(lambda x: (x * variable[...]).sum())(1.0) == 3.0
    assert jax.grad(lambda x, v: (x * v[...]).sum())(1.0, variable) == 3.0


def test_it_is_mapped_and_scanned():
    assert jax.vmap(lambda v: v[...] * 2)(hi()).tolist() == [2.0, 4.0]
    total, _ = jax.lax.scan(lambda carry, v: (carry + v[...], None), 0.0, hi())
    assert total == 3.0
