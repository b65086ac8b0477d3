"""Functions with bound arguments: jit_partial and cached_partial (contract, 6)."""

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import graftree as nnx
from tests import comparisons, meshes, modes, zoo


def box():
    return zoo.Box(
        w=nnx.Param(jnp.ones(2), tag="x"),
        sub=nnx.Dict(a=nnx.Param(jnp.zeros(1))),
        array=jnp.full(2, 3.0),
        static=1,
    )


def step(model, x):
    model.w[...] += x
    return model.w * 2


# ----------------------------------------------------------------------- jit_partial


BINDINGS = {
    "jit_partial, graph": functools.partial(nnx.jit_partial, **modes.GRAPH),
    "jit_partial, tree": functools.partial(nnx.jit_partial, **modes.TREE),
    "cached_partial": lambda f, *args: nnx.cached_partial(nnx.jit(f), *args),
}
EACH_BINDING = pytest.mark.parametrize("bind", BINDINGS.values(), ids=BINDINGS)


@EACH_BINDING
def test_bound_objects_are_updated(bind):
    model, traces = box(), []
    bound = bind(lambda *args: traces.append(1) or step(*args), model)
    assert bound(1.0).tolist() == [4.0, 4.0] and bound(1.0).tolist() == [6.0, 6.0]
    model.w[...] = jnp.zeros(2)
    assert bound(1.0).tolist() == [2.0, 2.0]
    assert model.w[...].tolist() == [1.0, 1.0] and len(traces) == 1
    assert bind(step, model).__name__ == "step"


def test_replaced_variables_and_static_changes_are_seen(value_mode):
    model = box()
    bound = nnx.jit_partial(lambda m: m.w * m.static + m.array, model, **value_mode)
    assert bound().tolist() == [4.0, 4.0]
    model.w = nnx.Param(jnp.full(2, 5.0))
    model.static, model.array = 2, jnp.zeros(2)
    assert bound().tolist() == [10.0, 10.0]


@EACH_BINDING
def test_any_number_of_arguments_can_be_bound(bind):
    def f(a, b, c, variable, x, *, y):
        a.w[...] += c
        b["m"][0].w[...] += x * y
        variable[...] += y

    a, b, other = box(), {"m": [box()]}, box()
    bind(f, a, b, 2.0, other.w)(3.0, y=4.0)
    assert (a.w[0], b["m"][0].w[0], other.w[0]) == (3.0, 13.0, 5.0)


def test_variables_in_calls_are_refused(value_mode):
    bound = nnx.jit_partial(lambda m, x, y=0: m.w + 1, box(), **value_mode)
    message = "Found Variable in non-partial arguments"
    for args, kwargs, path in (
        ((nnx.Param(1.0),), {}, r"\.args\[0\]"),
        (([box()],), {}, r"\.args\[0\]\[0\]\."),
        ((1.0,), {"y": box()}, r"\.kwargs\['y'\]\."),
    ):
        with pytest.raises(ValueError, match=message + f".*{path}"):
            bound(*args, **kwargs)


def test_bound_methods_and_filters_are_refused(value_mode):
    with pytest.raises(ValueError, match="bound methods"):
        nnx.jit_partial(box().eval, **value_mode)
    shardings = (nnx.StateSharding({...: None}),)
    message = "`in_shardings` cannot contain `StateSharding`"
    with pytest.raises(ValueError, match=message):
        nnx.jit_partial(step, box(), in_shardings=shardings, **value_mode)


@pytest.mark.parametrize(
    "static", [{"static_argnums": (1, 3)}, {"static_argnames": ("n", "m")}], ids=str
)
def test_positions_are_those_of_the_function(static, value_mode):
    def f(model, n, x, m):
        assert isinstance(n, int) and isinstance(m, int)
        model.w[...] += n * x + m

    model = box()
    bound = nnx.jit_partial(f, model, 2, **static, **value_mode)
    bound(3.0, 4)
    assert model.w[...].tolist() == [11.0, 11.0]
    bound.lower(3.0, 4).compile()(3.0)
    assert model.w[...].tolist() == [21.0, 21.0]


def test_shardings_are_those_of_all_arguments(value_mode):
    mesh = meshes.mesh_of(x=2)
    rows, everywhere = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())

    def f(a, b, x):
        a.w[...] += x
        b.w[...] += x
        return x

    for shardings, expected in (
        ([rows, None, everywhere], rows),
        ((everywhere, rows, None), everywhere),
        (everywhere, everywhere),
    ):
        a, b = zoo.Scale(jnp.ones(4)), zoo.Scale(jnp.ones(4))
        nnx.jit_partial(f, a, b, in_shardings=shardings, **value_mode)(1.0)
        assert a.w.get_value().sharding.is_equivalent_to(expected, 1)


def test_stages_take_the_arguments_of_a_call(value_mode):
    model = box()
    bound = nnx.jit_partial(step, model, **value_mode)
    x = jax.ShapeDtypeStruct((2,), jnp.float32)
    assert bound.eval_shape(x).shape == bound.trace(x).out_info.shape == (2,)
    compiled = bound.lower(x).compile()
    assert model.w[...].tolist() == [1.0, 1.0]
    assert compiled(jnp.ones(2)).tolist() == [4.0, 4.0]
    assert model.w[...].tolist() == [2.0, 2.0]
    with pytest.raises(ValueError, match="Found Variable in non-partial arguments"):
        compiled(box())


# -------------------------------------------------------------------- cached_partial


def test_copies_share_their_variables():
    model, seen = box(), []

    def look(bound):
        seen.append((bound is not model, bound.w is model.w, bound.sub is model.sub))

    nnx.cached_partial(look, model)()
    assert seen == [(True, True, False)]


def test_returned_copy_is_the_same_at_each_call():
    model = box()
    cached = nnx.cached_partial(nnx.jit(lambda m, x: (m, m.w)), model)
    (first, w), (second, _) = cached(1), cached(2)
    assert first is second and first is not model and w is model.w


@pytest.mark.parametrize("transform", [nnx.jit, lambda f: f], ids=["jit", "none"])
def test_structure_may_change_for_a_while(transform):
    def f(model):
        model.new = nnx.Param(model.w * 2)
        model.w[...] += model.new
        del model.new

    model = box()
    cached = nnx.cached_partial(transform(f), model)
    cached()
    cached()
    assert model.w[...].tolist() == [9.0, 9.0]


CHANGES = {
    "static": lambda m: setattr(m, "static", 2),
    "new attribute": lambda m: setattr(m, "new", nnx.Param(jnp.ones(1))),
    "deleted attribute": lambda m: delattr(m, "sub"),
    "replaced Variable": lambda m: setattr(m, "w", nnx.Param(jnp.ones(2), tag="x")),
    "swapped": lambda m: (setattr(m, "w", m.sub.a), None)[1],
    "metadata": lambda m: m.w.set_metadata(tag="y"),
}


@pytest.mark.parametrize("transform", [nnx.jit, lambda f, **_: f], ids=["jit", "none"])
@pytest.mark.parametrize("name", CHANGES)
def test_structure_that_stays_changed_is_an_error_and_undone(name, transform):
    def f(model, is_bad):
        model.w[...] += 1
        model.array = model.array + 1
        if is_bad:
            CHANGES[name](model)
        return model

    model, message = box(), "cached_partial was mutated inside"
    cached = nnx.cached_partial(transform(f, static_argnums=1), model)
    with comparisons.unchanged(model), pytest.raises(ValueError, match=message):
        cached(True)
    array, bound = model.array, cached(False)
    assert bound.w is model.w and bound.sub.a is model.sub.a and bound.static == 1
    assert model.w[...].tolist() == [2.0, 2.0] and bound.array.tolist() == [4.0, 4.0]
    assert model.array is array


def test_donated_buffers_are_not_brought_back():
    def f(model):
        model.w[...] += 1
        model.static = 2

    model = box()
    cached = nnx.cached_partial(nnx.jit(f, donate_argnums=0), model)
    with pytest.raises(ValueError, match="was mutated inside"):
        cached()
    assert model.w[...].tolist() == [2.0, 2.0] and model.sub.a[...] == 0.0


class Gate(nnx.Module):
    """Multiplies by its rate, as long as it is not told to `eval`."""

    def __init__(self):
        self.rate, self.deterministic = 0.5, False

    def __call__(self, x):
        return x if self.deterministic else x * self.rate


class Passing(Gate):
    def __call__(self, x):
        return x


class Net(nnx.Module):
    def __init__(self):
        ones = nnx.initializers.ones
        self.layer = nnx.Linear(
            2, 2, kernel_init=ones, bias_init=ones, rngs=nnx.Rngs(0)
        )
        self.gate = Gate()
        self.scale, self.sizes, self.array = 1.0, [1.0], jnp.array(1.0)
        self.extra = nnx.data([nnx.Param(jnp.array(1.0), factor=[1.0])])

    def __call__(self, x):
        x = self.gate(self.layer(x)) * self.scale * sum(self.sizes) * self.array
        return x + sum(p[...] * p.factor[0] for p in self.extra)


OUTSIDE = {
    "eval": lambda m: m.eval(),
    "type of a static": lambda m: setattr(m, "scale", 1),
    "static in place": lambda m: m.sizes.append(2.0),
    "array": lambda m: setattr(m, "array", jnp.array(3.0)),
    "Variable": lambda m: setattr(m.layer, "kernel", nnx.Param(jnp.zeros((2, 2)))),
    "class": lambda m: setattr(m.gate, "__class__", Passing),
    "container": lambda m: m.extra.append(nnx.Param(jnp.array(5.0), factor=[1.0])),
    "metadata in place": lambda m: m.extra[0].factor.insert(0, 3.0),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_changes_of_the_originals_are_seen(name):
    net, x = Net(), jnp.arange(2.0)
    cached = nnx.cached_partial(nnx.jit(lambda net, x: net(x)), net)

    def checked():
        found = [(y.dtype, y.tolist()) for y in (cached(x), cached(x), cached(x))]
        expected = nnx.clone(net)(x)
        assert found == [(expected.dtype, expected.tolist())] * 3
        return found

    before = checked()
    OUTSIDE[name](net)
    assert (checked() == before) is (name == "type of a static")
    net.train()
    checked()


def test_changes_below_bound_containers_are_seen():
    nets, x = {"nets": [Net()]}, jnp.arange(2.0)
    cached = nnx.cached_partial(lambda nets, x: nets["nets"][0](x), nets)
    cached(x), cached(x)
    nets["nets"][0].scale = 2.0
    assert jnp.array_equal(cached(x), nets["nets"][0](x))
    nets["nets"][0] = Passing()
    assert jnp.array_equal(cached(x), x)


def test_copies_stay_until_the_originals_change():
    net = Net()
    cached = nnx.cached_partial(lambda net: net, net)
    first = cached()
    net.train()  # as it was
    nnx.touch(net)
    net.layer.kernel[...] *= 2
    assert cached() is first
    net.eval()
    assert cached() is not first and cached() is cached()
    assert cached().layer.kernel is net.layer.kernel


def test_copies_made_in_a_trace_are_not_kept():
    net = Net()
    net.gate, net.extra = nnx.Dropout(0.5, rngs=nnx.Rngs(0)), nnx.data([])
    cached = nnx.cached_partial(lambda net, x: net(x), net)
    net.eval()
    expected = cached(jnp.ones(2))
    net.scale = 2.0
    assert jnp.array_equal(jax.jit(lambda x: cached(x))(jnp.ones(2)), 2 * expected)
    net.train()
    cached(jnp.ones(2))  # draws, which only the owner of the streams may


def test_dropped_functions_free_what_is_bound():
    cached = nnx.cached_partial(nnx.jit(lambda m: m), box())
    bound = weakref.ref(cached())
    del cached
    gc.collect()
    assert bound() is None
