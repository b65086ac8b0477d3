"""Rules between the parts (contract, section 17, as far as jit and grad go)."""

import jax
import jax.numpy as jnp

import graftree as nnx
from tests.zoo import Box


class Counter(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(3), tag="x")
        self.count = jnp.array(0)
        self.name = "counter"

    def __call__(self, x):
        return self.w * x


# ---------------------------------------------------------------------------- shapes


def test_shapes_of_a_model_without_making_it():
    model = jax.eval_shape(Counter)
    assert isinstance(model.w, nnx.Param) and model.w.tag == "x"
    assert isinstance(model.w.get_raw_value(), jax.ShapeDtypeStruct)
    assert (model.w.shape, model.w.dtype, model.count.shape) == ((3,), jnp.float32, ())
    assert model.w[...] == model.w.get_value() == model.w.get_raw_value()


def test_jitted_call_method_inside_eval_shape_keeps_the_model(mode):
    class Model(Counter):
        __call__ = nnx.jit(Counter.__call__, **mode)

    model = Model()
    before = dict(vars(model))
    assert jax.eval_shape(model, jax.ShapeDtypeStruct((3,), jnp.float32)).shape == (3,)
    assert vars(model) == before and model(jnp.ones(3)).shape == (3,)


# -------------------------------------------------------------------- updates, clones


def test_update_adds_attributes_and_sets_static_ones():
    model = Counter()
    nnx.update(model, {"new": nnx.Param(jnp.ones(1)), "name": "renamed"})
    assert model.name == "renamed" and model.new.shape == (1,)
    nodes = vars(model)["_pytree__nodes"]
    assert nodes["new"] is True and nodes["name"] is False


def test_deep_clone_survives_the_donation_of_its_original():
    model = Counter()
    kept = nnx.clone(model, arrays=True)
    jax.jit(lambda m: m.w[...] * 1, donate_argnums=0)(model)
    assert kept.w[...].tolist() == [1.0, 1.0, 1.0]


def test_merging_restores_statuses_statics_containers_and_sharing():
    shared = nnx.Param(jnp.ones(1))
    model = nnx.Dict(
        a=nnx.List([shared, nnx.static("s"), nnx.data("d")]), b=shared, c=Counter()
    )
    merged = nnx.merge(*nnx.split(model))
    assert type(merged.a) is nnx.List and merged.a[0] is merged.b
    assert merged.a[1:] == ["s", "d"] and merged.c.name == "counter"
    for mine, theirs in ((merged, model), (merged.a, model.a), (merged.c, model.c)):
        assert vars(mine)["_pytree__nodes"] == vars(theirs)["_pytree__nodes"]


# --------------------------------------------------------------------- weak of the peer


def test_lists_of_objects_made_in_a_trace_leave_it_whole():
    @jax.jit
    def make(x):
        return nnx.Dict(layers=nnx.List([nnx.Param(x), x]), bare=x)

    made = make(jnp.ones(2))
    assert made.layers[1].tolist() == made.bare.tolist() == [1.0, 1.0]


def test_nothing_about_attributes_depends_on_random_streams():
    rngs = nnx.Rngs(0)
    model = nnx.Dict(rngs=rngs)
    nnx.split(model)
    nnx.view(model, raise_if_not_found=False, deterministic=True)
    repr(model)
    assert rngs.default.count[...] == 0


# ---------------------------------------------------------------- idioms that must work


def test_shared_ref_variables_are_one_argument_of_jit():
    p = nnx.Param(jnp.ones(2), ref=True)
    graphdef, state = nnx.split(Box(a=p, b=p))

    @jax.jit
    def f(state):
        nnx.merge(graphdef, state).b[...] *= 3

    f(state)
    assert p[...].tolist() == [3.0, 3.0]
    assert nnx.find_duplicates(Box(a=p, b=p)) == [[("a",), ("b",)]]


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
    m = Box(a=a, b=b)
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
