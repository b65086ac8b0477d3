"""jit: what is traced again, donation, attributes, shardings (contract, section 6)."""

import functools
import pickle

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import graftree as nnx
from tests import comparisons, meshes, tables, zoo


def box(value=1.0):
    return zoo.Box(
        w=nnx.Param(jnp.full(2, value), tag="x"),
        s=nnx.BatchStat(jnp.zeros(2)),
        array=jnp.full(2, 3.0),
        static=1,
    )


def test_captured_models_may_be_read_by_an_inner_function_that_donates(mode):
    model = box()
    inner = nnx.jit(lambda m, x: (m.w * x).sum(), donate_argnums=0, **mode)

    def f(x):
        return inner(model, x)

    with comparisons.unchanged(model):
        assert jax.jit(f)(2.0) == 4.0 and jax.grad(f)(2.0) == 2.0
        assert jax.eval_shape(f, 2.0).shape == ()


def swap(m):
    m["a"], m["b"] = m["b"], m["a"]


@pytest.mark.parametrize(("other", "count"), [(zoo.Scale, 1), (zoo.Counter, 2)])
def test_swapped_modules_are_traced_once_for_each_structure(other, count):
    traces = []
    f = nnx.jit(lambda model: traces.append(1) or swap(model))
    model = nnx.Dict(a=zoo.Scale(), b=other())
    a, b = model.a, model.b
    for _ in range(2):
        f(model)
        assert model.a is b and model.b is a
        f(model)
        assert model.a is a and model.b is b
    assert len(traces) == count


def test_name_and_function_are_kept(mode):
    def f(x):
        return x

    for jitted in (nnx.jit(f, **mode), nnx.jit(**mode)(f)):
        assert jitted.fun is f and "jit_f" in jitted.lower(1.0).as_text()


def test_structure_may_change_beside_static_and_donated_arguments():
    def f(n, model, m, x):
        model.static = n + m
        model.new = nnx.Param(x)

    model = box()
    nnx.jit(f, static_argnums=(0, 2), donate_argnums=1)(1, model, 2, jnp.ones(1))
    assert model.static == 3 and model.new[...] == 1.0 and model.w[0] == 1.0


# -------------------------------------------------------------------------- donation


def test_donated_models_that_are_only_read_stay_readable(mode):
    model = nnx.Dict(a=nnx.Param(jnp.ones(2)), b=nnx.BatchStat(jnp.zeros(2)))
    step = nnx.jit(lambda model: model.a * 3, donate_argnames="model", **mode)
    for _ in range(2):
        assert step(model).tolist() == [3.0, 3.0]
    assert (model.a[...].tolist(), model.b[...].tolist()) == ([1.0] * 2, [0.0] * 2)


def test_nothing_of_a_model_is_donated_within_a_derivative(mode):
    def write(model, x):
        model.a[...] += jnp.sin(model.b[...]) * x
        return x * 1

    def loss(model, x, then=lambda: None):
        out = nnx.jit(write, donate_argnums=0, **mode)(model, x)
        then()
        return out

    model = zoo.Box(a=nnx.Param(jnp.ones(3)), b=nnx.BatchStat(jnp.zeros(3)))
    nnx.grad(loss, argnums=1, **mode)(model, 2.0)
    assert model.a[...].tolist() == [1, 1, 1] and model.b[...].tolist() == [0, 0, 0]
    with pytest.raises(ZeroDivisionError):
        failing = functools.partial(loss, then=lambda: 1 / 0)
        nnx.grad(failing, argnums=1, **mode)(model, 2.0)
    assert model.a[...].tolist() == [1, 1, 1] and model.b[...].tolist() == [0, 0, 0]


def test_donated_models_keep_their_array_attributes():
    model = box()
    nnx.jit(lambda m: m.w * m.array, donate_argnums=0)(model)
    assert model.array.tolist() == [3.0, 3.0]


def test_refs_of_donated_models_are_written_in_place():
    variable = nnx.Param(jnp.zeros(2), ref=True)
    ref = variable.get_raw_value()
    nnx.jit(lambda v: v.__setitem__(..., v + 1), donate_argnums=0)(variable)
    assert variable.get_raw_value() is ref and ref[...].tolist() == [1.0, 1.0]


def test_shared_variables_are_donated_once():
    model = box()
    nnx.jit(lambda a, b: a.w.set_value(a.w + b.w), donate_argnums=0)(model, model)
    assert model.w[...].tolist() == [2.0, 2.0]


SHARED = {
    "array": lambda array: array,
    "view": lambda array: array.addressable_data(0),
    "tree": lambda array: {"x": array},
}


@tables.cases(
    "transform, calls, name",
    *((nnx.jit, calls, name) for calls in (0, 3) for name in SHARED),
    (nnx.pmap, 3, "array"),
)
def test_arrays_in_two_donated_variables_are_named(transform, calls, name, mode):
    def step(model):
        model.w[...] += 1
        model.a.set_value(jax.tree.map(lambda x: x + 1, model.a.get_value()))

    share = SHARED[name]
    model = nnx.Dict(a=nnx.Param(share(jnp.ones(2))), w=nnx.Param(jnp.ones(2)))
    f = transform(step, donate_argnums=0, **mode)
    for _ in range(calls):
        f(model)
    model.a.set_value(share(model.w.get_value()))
    before = jax.tree.leaves(model)
    refused = f"nnx.{transform.__name__} can't donate the same buffer twice"
    places = "args[0].a, donated\n  args[0].w, donated"
    with comparisons.raises(ValueError, refused, places):
        f(model)
    assert all(x is y for x, y in zip(before, jax.tree.leaves(model), strict=True))
    assert not any(x.is_deleted() for x in before)
    model.w[...] = jnp.copy(model.w[...])
    f(model)


def test_an_array_over_several_devices_is_named(mode):
    mesh = jax.make_mesh((2,), ("data",))
    placed = jax.device_put(jnp.ones(2), jax.NamedSharding(mesh, jax.P("data")))
    model = nnx.Dict(a=nnx.Param(placed), w=nnx.Param(placed))

    @nnx.jit(donate_argnums=0, **mode)
    def f(model):
        for variable in model.values():
            variable[...] += 1

    for number in range(4):  # without a plan, and with one
        with pytest.raises(ValueError, match="can't donate the same buffer twice"):
            f(model)
        model.a[...] = jnp.copy(model.w[...])
        f(model)
        assert model.w[...].tolist() == model.a[...].tolist() == [number + 2.0] * 2
        model.a[...] = model.w[...]


def test_an_array_that_is_donated_and_read_is_named(mode):
    model = box()
    f = nnx.jit(lambda m, x: m.w.set_value(m.w + x[0]), donate_argnums=0, **mode)
    compiled = f.lower(model, [jnp.ones(2)]).compile()
    for call in (f, compiled, f):
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"donated\n  args\[1\]"):
            call(model, [model.w[...]])
    assert not model.w[...].is_deleted()


def test_keys_that_are_donated_twice_are_named():
    model = nnx.Dict(a=nnx.RngKey(jax.random.key(0)))
    model.b = nnx.RngKey(model.a[...])

    @nnx.jit(donate_argnums=0)
    def f(model):
        for key in model.values():
            key.set_value(jax.random.split(key[...])[0])

    with comparisons.raises(ValueError, "args[0].a, donated\n  args[0].b, donated"):
        f(model)


def test_keyword_arguments_can_be_donated():
    def step(*, x, model):
        model.s[...] += x
        return x + model.w

    x, model = jnp.ones(2), box()
    nnx.jit(step, donate_argnames=("x", "model"))(x=x, model=model)
    assert x.is_deleted()
    assert model.w[...].tolist() == model.s[...].tolist() == [1.0, 1.0]


def test_exception_in_a_donating_function_leaves_the_buffers():
    def fails(model):
        model.w[...] += 1
        raise RuntimeError

    model = box()
    with pytest.raises(RuntimeError):
        nnx.jit(fails, donate_argnums=0)(model)
    assert model.w[...].tolist() == [1.0, 1.0]


# ------------------------------------------------------------- what a function has


def test_what_was_given_can_be_read():
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    places = {"in_shardings": device, "out_shardings": device}
    call = nnx.jit(lambda x, n: x, static_argnums=(1,), **places)
    assert call.in_shardings is device and call.out_shardings is device
    assert call.static_argnums == (1,) and call.partial_args == ()
    assert [nnx.jit(abs, graph=x).graph for x in (True, False)] == [True, False]


def test_attributes_of_a_function_are_those_of_what_transforms_make_of_it():
    def loss(m, x=1.0):
        return (m.p[...] * x).sum()

    loss.tag, loss._own = "mine", "too"
    jitted = nnx.jit(loss)
    bound = nnx.cached_partial(jitted, nnx.Dict(p=nnx.Param(jnp.ones(2))))
    made = [jitted, nnx.grad(loss), nnx.vmap(loss), nnx.remat(loss), nnx.jit(jitted)]
    for function in (*made, nnx.value_and_grad(jitted), bound):
        assert function.tag == "mine"
    assert jitted._own == "too"
    bound()
    assert bound.jitted_fn is jitted.jitted_fn and bound.fun is loss
    assert bound.jitted_fn._cache_size() == 1


def test_attributes_of_a_function_do_not_reach_into_what_jit_keeps():
    def double(x):
        return x * 2

    for name in vars(nnx.jit(double)):
        if not name.startswith("__"):
            setattr(double, name, "mine")
    call = nnx.jit(double)
    assert float(call(2.0)) == float(nnx.jit(call)(2.0)) == 4.0
    assert "mine" not in vars(call).values()
    assert pickle.loads(cloudpickle.dumps(call))(1.0) == 2.0


# ---------------------------------------------------------------------------- shardings


MESH = meshes.mesh_of(x=4, y=2)


def sharding(*spec):
    return NamedSharding(MESH, P(*spec))


ROWS, COLUMNS, EVERYWHERE = sharding("x"), sharding(None, "y"), sharding()


def pair():
    ones, zeros = (jnp.asarray(np.full((8, 4), x, np.float32)) for x in (1, 0))
    return zoo.Box(kernel=nnx.Param(ones), stat=nnx.BatchStat(zeros))


def is_placed(x, expected):
    x = x.get_value() if isinstance(x, nnx.Variable) else x
    return x.sharding.is_equivalent_to(expected, x.ndim)


def are_placed(model, of_kernel, of_stat):
    return is_placed(model.kernel, of_kernel) and is_placed(model.stat, of_stat)


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


OF_EACH = ROWS, None, COLUMNS, ROWS


def in_containers(a, b, c, x):
    return a, [b], {"m": c}, x


# Options, arguments of three models and an array, and where the models are put.
PREFIXES = {
    "one of all": ({"in_shardings": ROWS}, in_containers, (ROWS, ROWS, ROWS)),
    "a tuple": ({"in_shardings": OF_EACH}, in_containers, (ROWS, None, COLUMNS)),
    "a list": ({"in_shardings": [*OF_EACH]}, in_containers, (ROWS, None, COLUMNS)),
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


def test_outputs_are_placed_elsewhere_than_the_arguments(mode):
    places = ROWS, {"a": ROWS, "b": None}

    @nnx.jit(in_shardings=(COLUMNS,), out_shardings=places, **mode)
    def f(model):
        model.kernel[...] += 1
        x = model.kernel * 2
        return pair(), {"a": x, "b": x}

    model = pair()
    made, out = f(model)
    assert is_placed(made.kernel, ROWS) and is_placed(out["a"], ROWS)
    assert is_placed(model.kernel, COLUMNS)


def test_shared_variable_needs_one_sharding(graph_mode):
    step = nnx.jit(lambda a, b: None, in_shardings=(ROWS, COLUMNS), **graph_mode)
    shared = nnx.Param(jnp.ones((8, 4)))
    told = "Inconsistent aliasing detected", "Node: Param", f"0/a: {ROWS}", "1/b: "
    with comparisons.raises(ValueError, *told):
        step({"a": shared}, {"b": shared})
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
