"""jit: its cache, static arguments, donation (contract, section 6)."""

import operator
import pickle

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import modes


class Model(nnx.Module):
    def __init__(self, value=1.0):
        self.w = nnx.Param(jnp.full(2, value), tag="x")
        self.s = nnx.BatchStat(jnp.zeros(2))
        self.array = jnp.full(2, 3.0)
        self.static = 1


def counting(f, **options):
    """The jitted function, and a list that grows by one with every trace."""
    traces = []

    def traced(*args, **kwargs):
        traces.append(None)
        return f(*args, **kwargs)

    return nnx.jit(traced, **options), traces


# --------------------------------------------------------------------------- results


def test_results_equal_those_of_the_function(mode):
    def f(model, x, *, scale):
        model.s[...] += x
        return {"y": model.w * x * scale, "n": 3, "none": None}

    jitted, plain = Model(), Model()
    out = nnx.jit(f, **mode)(jitted, 2.0, scale=4.0)
    expected = f(plain, 2.0, scale=4.0)
    assert out["y"].tolist() == expected["y"].tolist() and out["none"] is None
    assert isinstance(out["n"], jax.Array) and out["n"] == 3
    assert jitted.s[...].tolist() == plain.s[...].tolist() == [2.0, 2.0]


def test_objects_anywhere_in_the_arguments_are_updated(mode):
    def f(tree, *, named):
        tree["a"][0].w[...] += 1
        tree["v"][...] += 1
        named.s[...] += 1

    model, variable, named = Model(), nnx.Param(jnp.zeros(2)), Model()
    nnx.jit(f, **mode)({"a": [model], "v": variable}, named=named)
    assert model.w[...].tolist() == [2.0, 2.0]
    assert variable[...].tolist() == named.s[...].tolist() == [1.0, 1.0]


def test_objects_made_inside_can_be_returned_and_changed(mode):
    model = nnx.jit(lambda: nnx.List([Model(), nnx.Param(jnp.ones(1))]), **mode)()
    model[0].w[...] += 1
    model[0].new = 1
    model.append(2)
    assert model[0].w[...].tolist() == [2.0, 2.0] and model[0].w.tag == "x"


def test_plain_pytrees_and_states_pass(mode):
    graphdef, state = nnx.split(Model())

    def f(graphdef, state):
        model = nnx.merge(graphdef, state, copy=True)
        model.w[...] *= 2
        return nnx.split(model)

    _, new = nnx.jit(f, **mode)(graphdef, state)
    assert new["w"][...].tolist() == [2.0, 2.0]
    assert state["w"][...].tolist() == [1.0, 1.0]


def test_values_that_are_no_arrays_are_refused_by_jax(mode):
    with pytest.raises(TypeError):
        nnx.jit(lambda x: x, **mode)("text")


@pytest.mark.parametrize("name", ["graph_updates", "graph", "tree"])
@pytest.mark.parametrize("transform", ["jit", "grad", "eval_shape"])
@pytest.mark.parametrize("options", [{}, {"donate_argnums": 0}], ids=str)
def test_captured_models_may_be_read_by_an_inner_function(name, transform, options):
    model = Model()
    before = dict(vars(model)), jax.tree.leaves(model)
    inner = nnx.jit(lambda m, x: (m.w * x).sum(), **options, **modes.BY_NAME[name])
    out = {
        "jit": lambda f: jax.jit(f)(2.0) == 4.0,
        "grad": lambda f: jax.grad(f)(2.0) == 2.0,
        "eval_shape": lambda f: jax.eval_shape(f, 2.0).shape == (),
    }[transform](lambda x: inner(model, x))
    assert out and dict(vars(model)) == before[0]
    assert all(map(operator.is_, jax.tree.leaves(model), before[1]))


WRITES = {
    "value": lambda m: m.w.set_value(m.w * 2),
    "metadata": lambda m: m.w.set_metadata(tag="y"),
    "attribute": lambda m: setattr(m, "static", 2),
    "array": lambda m: setattr(m, "array", m.array * 2),
}


@pytest.mark.parametrize("name", WRITES)
def test_captured_models_may_not_be_written_and_stay_whole(name, mode):
    model = Model()
    before = dict(vars(model)), jax.tree.leaves(model)
    inner = nnx.jit(lambda m: WRITES[name](m), **mode)
    if name in ("value", "metadata") or mode.get("graph_updates"):
        with pytest.raises(nnx.errors.TraceContextError, match="Cannot mutate"):
            jax.jit(lambda: inner(model))()
    else:
        jax.jit(lambda: inner(model))()
    assert dict(vars(model)) == before[0] and model.w.tag == "x"
    assert all(map(operator.is_, jax.tree.leaves(model), before[1]))


def test_captured_model_is_a_constant(mode):
    model = Model()
    assert nnx.jit(lambda x: model.w * x, **mode)(2.0).tolist() == [2.0, 2.0]
    assert nnx.jit(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), **mode)(jnp.ones((1, 2))).shape


def test_no_tracer_outlives_a_call(mode):
    def f(model, x):
        model.w[...] += x
        model.new, model.array = nnx.Param(model.w * 2), model.array * x
        return [nnx.Param(x), model.w * x]

    with jax.checking_leaks():
        nnx.jit(f, **mode)(Model(), 2.0)
        nnx.jit(f, **mode).eval_shape(Model(), 2.0)


def test_arrays_in_new_attributes_are_data(mode):
    def f(model, x):
        model.new, model.named = x * 2, nnx.data({"x": x})
        made = nnx.Dict()
        made.array = x * 3
        return made

    model = Model()
    made = nnx.jit(f, **mode)(model, jnp.ones(2))
    assert made.array.tolist() == [3.0, 3.0] and nnx.is_data(made.array)
    if mode.get("graph_updates"):
        assert model.new.tolist() == [2.0, 2.0] and model.named["x"].tolist() == [1, 1]
        nnx.jit(f, **mode)(model, jnp.zeros(2))
        assert model.new.tolist() == [0.0, 0.0]


def test_metadata_changes_reach_the_caller_and_retrace(mode):
    f, traces = counting(lambda m: m.w.set_metadata(tag="y"), **mode)
    model = Model()
    for expected in (1, 2, 2):
        f(model)
        assert model.w.tag == "y" and len(traces) == expected


def test_counts_of_streams_advance(mode):
    rngs, plain = nnx.Rngs(0), nnx.Rngs(0)
    draw = nnx.jit(lambda rngs: rngs.normal((2,)), **mode)
    for _ in range(2):
        assert np.allclose(draw(rngs), plain.normal((2,)))
    assert rngs.default.count[...] == 2


# ----------------------------------------------------------------------------- cache


def test_values_do_not_retrace(mode):
    f, traces = counting(lambda m, x: m.s.set_value(m.s + x), **mode)
    model = Model()
    for i in range(3):
        f(model, float(i))
        f(Model(float(i)), 1.0)
    assert len(traces) == 1 and model.s[...].tolist() == [3.0, 3.0]


CHANGES = {
    "shape": lambda m: m.w.set_value(jnp.zeros(3)),
    "dtype": lambda m: m.w.set_value(jnp.zeros(2, jnp.int32)),
    "metadata": lambda m: m.w.set_metadata(tag="y"),
    "type": lambda m: setattr(m, "w", nnx.Cache(jnp.zeros(2), tag="x")),
    "static": lambda m: setattr(m, "static", 2),
    "status": lambda m: setattr(m, "static", nnx.data(1)),
    "new attribute": lambda m: setattr(m, "new", 1),
    "deleted attribute": lambda m: delattr(m, "array"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_other_structures_are_traced_once_each(name, mode):
    f, traces = counting(lambda m: m.w.sum(), **mode)
    for _ in range(2):
        model = Model()
        f(model)
        CHANGES[name](model)
        f(model)
        f(model)
    assert len(traces) == 2


def test_swapped_modules_of_one_type_do_not_retrace():
    def swap(m):
        m["a"], m["b"] = m["b"], m["a"]

    f, traces = counting(swap)
    model = nnx.Dict(
        a=nnx.Dict(w=nnx.Param(jnp.ones(1))), b=nnx.Dict(w=nnx.Param(jnp.ones(1)))
    )
    a, b = model.a, model.b
    f(model)
    assert model.a is b and model.b is a
    f(model)
    assert model.a is a and len(traces) == 1


def test_modules_of_other_types_are_traced_once_in_each_place():
    def swap(m):
        m["a"], m["b"] = m["b"], m["a"]

    f, traces = counting(swap)
    model = nnx.Dict(a=Model(), b=nnx.Dict(w=nnx.Param(jnp.ones(1))))
    for _ in range(4):
        f(model)
    assert len(traces) == 2


# ------------------------------------------------------------------- forms of use


class Doubler(nnx.Module):
    """A module whose methods are compiled, its constructor too."""

    traces: list = []

    @nnx.jit(static_argnums=(1, 2))
    def __init__(self, din, dout, rngs):
        self.traces.append(None)
        self.din, self.dout = din, dout
        self.kernel = nnx.Param(rngs.params.normal((din, dout)))
        self.again = self.kernel

    @nnx.jit
    def __call__(self, x):
        return 2 * x @ self.kernel

    @nnx.jit(static_argnums=1)
    def power(self, n):
        assert isinstance(n, int)
        self.kernel[...] **= n


def test_constructors_can_be_compiled():
    Doubler.traces.clear()
    a, b = Doubler(2, 3, nnx.Rngs(0)), Doubler(2, 3, nnx.Rngs(1))
    assert isinstance(a.din, int) and a.dout == 3 and a.again is a.kernel
    assert len(Doubler.traces) == 1 and a.kernel is not b.kernel
    np.testing.assert_allclose(a.kernel, nnx.Rngs(0).params.normal((2, 3)))
    Doubler(2, 4, nnx.Rngs(0))
    assert len(Doubler.traces) == 2


def test_methods_can_be_compiled():
    model = Doubler(2, 3, nnx.Rngs(0))
    before = model.kernel[...]
    np.testing.assert_allclose(model(jnp.ones((1, 2))), 2 * before.sum(0)[None])
    model.power(2)
    np.testing.assert_allclose(model.kernel, before**2)
    assert Doubler.power is vars(Doubler)["power"]
    assert model.power.func is Doubler.power and model.power.args == (model,)


def test_classes_can_be_compiled(mode):
    make = nnx.jit(nnx.Linear, static_argnums=(0, 1), **mode)
    model = make(2, 3, rngs=nnx.Rngs(0))
    assert type(model) is nnx.Linear and model.in_features == 2
    np.testing.assert_allclose(model.kernel, nnx.Linear(2, 3, rngs=nnx.Rngs(0)).kernel)


def test_name_and_function_are_kept(mode):
    def f(x):
        """Doc."""
        return x

    for jitted in (nnx.jit(f, **mode), nnx.jit(**mode)(f)):
        assert jitted.fun is jitted.__wrapped__ is f
        assert (jitted.__name__, jitted.__doc__) == ("f", "Doc.")
    assert "jit_f" in nnx.jit(f, **mode).lower(1.0).as_text()


# ------------------------------------------------------------------ static arguments


@pytest.mark.parametrize(
    "options",
    [
        {"static_argnums": 1},
        {"static_argnums": (1,)},
        {"static_argnums": -2},
        {"static_argnames": "n"},
        {"static_argnames": ("n",)},
    ],
    ids=str,
)
def test_static_arguments_are_python_values(options, mode):
    def f(model, n, x):
        assert isinstance(n, int)
        model.s[...] += n * x
        return n

    jitted = nnx.jit(f, **options, **mode)
    model = Model()
    jitted(model, 2, 3.0)
    assert model.s[...].tolist() == [6.0, 6.0]
    if options != {"static_argnums": -2}:
        jitted(model, n=1, x=1.0)
        assert model.s[...].tolist() == [7.0, 7.0]


def test_static_values_are_part_of_the_cache(mode):
    f, traces = counting(lambda x, n: x * n, static_argnums=1, **mode)
    assert [float(f(2.0, n)) for n in (1, 2, 1, 2)] == [2.0, 4.0, 2.0, 4.0]
    assert len(traces) == 2


def test_wrong_static_arguments_are_refused(mode):
    with pytest.raises(ValueError, match="1 positional"):
        nnx.jit(lambda *args: None, static_argnums=-3, **mode)(1.0)
    with pytest.raises(ValueError, match="1 positional arguments"):
        nnx.jit(lambda x: None, static_argnums=1, **mode)
    with pytest.raises(ValueError, match="hashable"):
        nnx.jit(lambda x, n: x, static_argnums=1, **mode)(1.0, [1])
    with pytest.raises(ValueError, match="cannot intersect"):
        nnx.jit(lambda x, n: x, static_argnums=1, donate_argnames="n", **mode)


def test_structure_may_change_beside_static_and_donated_arguments():
    def f(n, model, m, x):
        model.static = n + m
        model.new = nnx.Param(x)

    model = Model()
    nnx.jit(f, static_argnums=(0, 2), donate_argnums=1)(1, model, 2, jnp.ones(1))
    assert model.static == 3 and model.new[...] == 1.0 and model.w[0] == 1.0


# -------------------------------------------------------------------------- donation


@pytest.mark.parametrize(
    "options", [{"donate_argnums": 0}, {"donate_argnames": "model"}]
)
@pytest.mark.parametrize("writes", [True, False])
def test_donated_models_stay_readable(options, writes, mode):
    def f(model, x):
        if writes:
            model.w[...] += x
        return model.w.sum()

    model = Model()
    step = nnx.jit(f, **options, **mode)
    for _ in range(2):
        step(model, 1.0)
    assert model.w[...].tolist() == ([3.0, 3.0] if writes else [1.0, 1.0])
    assert model.s[...].tolist() == [0.0, 0.0]


def test_donated_buffers_are_reused():
    model = Model()
    before = model.w[...]
    nnx.jit(lambda m: m.w.set_value(m.w + 1), donate_argnums=0)(model)
    assert before.is_deleted() and not model.w[...].is_deleted()


def test_donated_arrays_are_deleted(mode):
    x, kept = jnp.ones(2), jnp.ones(2)
    nnx.jit(lambda x, y: x + y, donate_argnums=0, **mode)(x, kept)
    assert x.is_deleted() and not kept.is_deleted()


def test_donated_models_keep_their_array_attributes():
    model = Model()
    nnx.jit(lambda m: m.w * m.array, donate_argnums=0)(model)
    assert model.array.tolist() == [3.0, 3.0]


def test_shared_variables_are_donated_once():
    model = Model()
    step = nnx.jit(lambda a, b: a.w.set_value(a.w + b.w), donate_argnums=0)
    step(model, model)
    assert model.w[...].tolist() == [2.0, 2.0]


def test_one_buffer_in_two_variables_is_not_donated_twice(mode):
    a, b = Model(), Model()
    b.w.set_value(a.w.get_value())
    step = nnx.jit(lambda a, b: a.w * b.w, donate_argnums=(0, 1), **mode)
    with pytest.raises(
        jax.errors.JaxRuntimeError, match="donate the same buffer twice"
    ):
        step(a, b)


def give_array(model):
    model.a.set_value(model.w.get_value())


def give_view(model):
    model.a.set_value(model.w.get_value().addressable_data(0))


def give_tree(model):
    model.a.set_value({"x": model.w.get_value()})


@pytest.mark.parametrize("is_warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("share", [give_array, give_view, give_tree])
def test_arrays_in_two_donated_variables_are_named(share, is_warm, mode):
    def step(model):
        model.w[...] += 1
        model.a.set_value(jax.tree.map(lambda x: x + 1, model.a.get_value()))

    value = {"x": jnp.ones(2)} if share is give_tree else jnp.ones(2)
    model = nnx.Dict(a=nnx.Param(value), w=nnx.Param(jnp.ones(2)))
    f = nnx.jit(step, donate_argnums=0, **mode)
    for _ in range(3 * is_warm):
        f(model)
    share(model)
    before = jax.tree.leaves(model)
    with pytest.raises(ValueError, match="can't donate the same buffer twice") as info:
        f(model)
    assert "args[0].a, donated\n  args[0].w, donated" in str(info.value)
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
    model = Model()
    f = nnx.jit(lambda m, x: m.w.set_value(m.w + x[0]), donate_argnums=0, **mode)
    compiled = f.lower(model, [jnp.ones(2)]).compile()
    for call in (f, compiled, f):
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"donated\n  args\[1\]"):
            call(model, [model.w[...]])
    assert not model.w[...].is_deleted()


def test_keys_that_are_donated_twice_are_named():
    model = nnx.Dict(a=nnx.RngKey(jax.random.key(0)))
    model.b = nnx.RngKey(model.a[...])
    f = nnx.jit(
        lambda m: [x.set_value(jax.random.split(x[...])[0]) for x in m.values()]
    )
    f = nnx.jit(f.fun, donate_argnums=0)
    with pytest.raises(
        ValueError, match=r"args\[0\].a, donated\n  args\[0\].b, donated"
    ):
        f(model)


def test_deep_clones_can_be_donated_beside_their_original(mode):
    model = Model()
    cloned = nnx.clone(model, arrays=True)
    nnx.jit(lambda a, b: a.w.set_value(a.w + b.w), donate_argnums=(0, 1), **mode)(
        model, cloned
    )
    assert model.w[...].tolist() == [2.0, 2.0]


def test_keyword_arguments_can_be_donated():
    x, model = jnp.ones(2), Model()
    step = nnx.jit(lambda *, x, model: x + model.w, donate_argnames=("x", "model"))
    step(x=x, model=model)
    assert x.is_deleted() and model.w[...].tolist() == [1.0, 1.0]


def test_exception_in_a_donating_function_leaves_the_buffers():
    def fails(model):
        model.w[...] += 1
        raise RuntimeError

    model = Model()
    with pytest.raises(RuntimeError):
        nnx.jit(fails, donate_argnums=0)(model)
    assert model.w[...].tolist() == [1.0, 1.0]


# ------------------------------------------------------------------------------ refs


@pytest.mark.parametrize("name", ["graph_updates", "graph", "tree"])
def test_ref_backed_variables_are_written_in_place(name):
    variable = nnx.Param(jnp.zeros(2), ref=True)
    ref = variable.get_raw_value()
    options = {"donate_argnums": 0} if name == "graph" else {}
    nnx.jit(lambda v: v.__setitem__(..., v + 1), **options, **modes.BY_NAME[name])(
        variable
    )
    assert variable.get_raw_value() is ref and ref[...].tolist() == [1.0, 1.0]


def test_same_ref_twice_is_one_object_inside():
    variable = nnx.Param(jnp.zeros(2), ref=True)

    @nnx.jit
    def f(a, b):
        assert a is b
        a[...] += 1

    f(variable, variable)
    assert variable[...].tolist() == [1.0, 1.0]


# ------------------------------------------------------------- what a function has


def test_the_function_of_jax_tells_how_many_programs_there_are(mode):
    model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    call = nnx.jit(lambda m, x: m(x), **mode)
    for shape in ((1, 1), (2, 1), (1, 1)):
        call(model, jnp.ones(shape))
    assert call.jitted_fn._cache_size() == 2


def test_what_was_given_can_be_read():
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    call = nnx.jit(
        lambda x, n: x, in_shardings=device, out_shardings=device, static_argnums=(1,)
    )
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
