"""jit: shardings of arguments and outputs (contract, section 6), on eight devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import graftree as nnx
from tests import zoo
from tests.meshes import mesh_of

MESH = mesh_of(x=4, y=2)


def sharding(*spec):
    return NamedSharding(MESH, P(*spec))


ROWS, COLUMNS, EVERYWHERE = sharding("x"), sharding(None, "y"), sharding()


def pair():
    kernel, stat = np.ones((8, 4), np.float32), np.zeros((8, 4), np.float32)
    return zoo.Box(
        kernel=nnx.Param(jnp.asarray(kernel)), stat=nnx.BatchStat(jnp.asarray(stat))
    )


def is_placed(x, expected):
    x = x.get_value() if isinstance(x, nnx.Variable) else x
    return x.sharding.is_equivalent_to(expected, x.ndim)


def are_placed(model, of_kernel, of_stat):
    return is_placed(model.kernel, of_kernel) and is_placed(model.stat, of_stat)


# ----------------------------------------------------------------- arguments


def test_graph_updates_place_all_variables_of_the_caller():
    model = pair()
    variable = model.kernel
    nnx.jit(lambda model: None, in_shardings=(ROWS,))(model)
    assert model.kernel is variable and are_placed(model, ROWS, ROWS)
    np.testing.assert_array_equal(model.kernel[...], np.ones((8, 4)))


def test_other_modes_place_only_the_variables_that_change(value_mode):
    model = pair()
    kept = model.stat.get_value()

    @nnx.jit(in_shardings=(ROWS,), **value_mode)
    def step(model):
        model.kernel[...] *= 2

    step(model)
    assert is_placed(model.kernel, ROWS) and model.kernel[0, 0] == 2.0
    assert model.stat.get_value() is kept


# Options, arguments of three models and an array, and where the models are put.
PREFIXES = {
    "one of all": (
        {"in_shardings": ROWS},
        lambda a, b, c, x: (a, [b], c, x),
        (ROWS, ROWS, ROWS),
    ),
    "a tuple": (
        {"in_shardings": (ROWS, None, COLUMNS, ROWS)},
        lambda a, b, c, x: (a, [b], {"m": c}, x),
        (ROWS, None, COLUMNS),
    ),
    "a list": (
        {"in_shardings": [ROWS, None, COLUMNS, ROWS]},
        lambda a, b, c, x: (a, [b], {"m": c}, x),
        (ROWS, None, COLUMNS),
    ),
    "containers": (
        {"in_shardings": ({"a": ROWS, "b": [COLUMNS, EVERYWHERE]}, None)},
        lambda a, b, c, x: ({"a": a, "b": [b, c]}, x),
        (ROWS, COLUMNS, EVERYWHERE),
    ),
    "static arguments have none": (
        {"in_shardings": (ROWS, COLUMNS, None, ROWS), "static_argnums": (0, 2)},
        lambda a, b, c, x: (1, a, 2, b, c, x),
        (ROWS, COLUMNS, None),
    ),
}


@pytest.mark.parametrize("name", PREFIXES)
def test_prefixes_place_arguments_and_what_is_in_them(name, mode):
    options, put, places = PREFIXES[name]

    @nnx.jit(**options, **mode)
    def step(*args):
        leaves = jax.tree.leaves(args, is_leaf=lambda x: isinstance(x, nnx.Module))
        for model in leaves:
            if isinstance(model, nnx.Module):
                model.kernel[...] += args[-1]

    models = pair(), pair(), pair()
    step(*put(*models, np.ones((8, 4), np.float32)))
    for model, place in zip(models, places, strict=True):
        assert model.kernel[0, 0] == 2.0
        assert place is None or is_placed(model.kernel, place)


def test_prefix_of_another_length_is_refused(mode):
    with pytest.raises(ValueError, match="in_shardings"):
        nnx.jit(lambda a: None, in_shardings=(ROWS, ROWS), **mode)(pair())


def test_keyword_arguments_have_no_sharding(mode):
    @nnx.jit(in_shardings=(ROWS,), **mode)
    def step(a, *, b):
        a.kernel[...] += 1
        b.kernel[...] += 1

    a, b = pair(), pair()
    step(a, b=b)
    assert is_placed(a.kernel, ROWS) and b.kernel[0, 0] == 2.0


def test_sharding_of_an_argument_wins_over_a_constraint_inside():
    @nnx.jit(in_shardings=(ROWS,))
    def step(model):
        model.kernel[...] = jax.lax.with_sharding_constraint(model.kernel * 2, COLUMNS)

    model = pair()
    step(model)
    assert is_placed(model.kernel, ROWS)


def test_specs_are_resolved_by_the_mesh_in_force(mode):
    shardings = {"in_shardings": P("x"), "out_shardings": P()}
    model = pair()
    with jax.set_mesh(MESH):
        nnx.jit(lambda m: m.kernel.set_value(m.kernel * 2), **shardings, **mode)(model)
    assert is_placed(model.kernel, ROWS)


def test_placed_arguments_can_be_donated(mode):
    @nnx.jit(in_shardings=(ROWS, None), donate_argnums=0, **mode)
    def step(model, x):
        model.kernel[...] += x

    model = pair()
    for _ in range(2):
        step(model, jnp.ones(()))
    assert are_placed(model, ROWS, ROWS) and model.kernel[0, 0] == 3.0


# -------------------------------------------------------------- StateSharding


STATE_SHARDINGS = {
    "types": {nnx.Param: ROWS, ...: COLUMNS},
    "paths and types": [("kernel", ROWS), (nnx.Param, ROWS), (..., COLUMNS)],
    "a state": nnx.State({"kernel": ROWS, "stat": COLUMNS}),
}


@pytest.mark.parametrize("given", STATE_SHARDINGS.values(), ids=STATE_SHARDINGS)
def test_state_sharding_places_arguments_and_new_objects(given):
    shardings = nnx.StateSharding(given)
    model = pair()
    nnx.jit(lambda model: None, in_shardings=(shardings,))(model)
    made = nnx.jit(pair, out_shardings=shardings)()
    assert are_placed(model, ROWS, COLUMNS) and are_placed(made, ROWS, COLUMNS)


def test_leaf_without_sharding_is_an_error():
    step = nnx.jit(lambda m: None, in_shardings=(nnx.StateSharding({nnx.Param: ROWS}),))
    with pytest.raises(ValueError, match="No axis found for.*stat"):
        step(pair())


# -------------------------------------------------------------------- outputs


def test_outputs_are_placed_elsewhere_than_the_arguments(mode):
    @nnx.jit(
        in_shardings=(COLUMNS,), out_shardings=(ROWS, {"a": ROWS, "b": None}), **mode
    )
    def f(model):
        model.kernel[...] += 1
        x = model.kernel * 2
        return pair(), {"a": x, "b": x}

    model = pair()
    made, out = f(model)
    assert is_placed(made.kernel, ROWS) and is_placed(out["a"], ROWS)
    assert is_placed(model.kernel, COLUMNS)


# -------------------------------------------------------------------- sharing


def test_shared_variable_needs_one_sharding(graph_mode):
    step = nnx.jit(lambda a, b: None, in_shardings=(ROWS, COLUMNS), **graph_mode)
    shared = nnx.Param(jnp.ones((8, 4)))
    with pytest.raises(ValueError, match="Inconsistent aliasing detected") as error:
        step({"a": shared}, {"b": shared})
    for text in ("Node: Param", "0/a: ", "1/b: ", str(ROWS)):
        assert text in str(error.value)
    assert is_placed(shared, jnp.ones(()).sharding)


def test_shared_variable_may_have_one_sharding_twice():
    shared = nnx.Param(jnp.ones((8, 4)))
    shardings = (ROWS, nnx.StateSharding({nnx.Param: ROWS}))
    step = nnx.jit(lambda a, b: None, in_shardings=shardings)
    step(nnx.Dict(a=shared), nnx.Dict(b=shared))
    assert is_placed(shared, ROWS)


def test_returned_argument_needs_the_same_sharding():
    model = pair()
    same = nnx.jit(lambda m: m, in_shardings=(ROWS,), out_shardings=ROWS)
    assert same(model) is model and is_placed(model.kernel, ROWS)
    other = nnx.jit(lambda m: m, in_shardings=(ROWS,), out_shardings=COLUMNS)
    with pytest.raises(ValueError, match="Inconsistent aliasing detected"):
        other(model)
    assert is_placed(model.kernel, ROWS)


# ----------------------------------------------------------------- what is refused


def test_prefixes_of_objects_place_by_filter(value_mode):
    filters = {nnx.Param: ROWS, ...: COLUMNS}
    prefix = nnx.prefix(pair(), filters, graph=value_mode["graph"])

    @nnx.jit(in_shardings=(prefix,), out_shardings=prefix, **value_mode)
    def step(model):
        model.kernel[...] += 1
        model.stat[...] += 1
        return pair()

    model = pair()
    out = step(model)
    assert are_placed(model, ROWS, COLUMNS) and are_placed(out, ROWS, COLUMNS)


# ---------------------------------------------------------------------- the peer


@pytest.mark.peers
@pytest.mark.parametrize("writes", [True, False])
def test_placement_is_that_of_the_peer(writes, mode):
    def run(library):
        def step(first, second):
            if writes:
                first.a[...] += second.a
            return library.Param(first.a * 2)

        models = [
            library.Dict(
                a=library.Param(jnp.ones((8, 4))),
                b=library.BatchStat(jnp.zeros((8, 4))),
            )
            for _ in range(2)
        ]
        options = {"in_shardings": (ROWS, COLUMNS), "out_shardings": EVERYWHERE}
        out = library.jit(step, **options, **mode)(*models)
        variables = [out] + [v for m in models for v in (m.a, m.b)]
        return [(v.get_value().sharding, np.ravel(v)[0].item()) for v in variables]

    assert run(nnx) == run(pytest.importorskip("flax.nnx"))
