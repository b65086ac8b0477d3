"""`load_state`: all of a state gets into an object, or nothing does and it is said."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import graftree as nnx
from tests import tables, zoo

load_state = nnx.checkpoints.load_state


def model(shift=0.0):
    return nnx.Dict(
        layers=nnx.List(
            [nnx.Dict(w=nnx.Param(jnp.full(2, i + shift))) for i in (0, 1)]
        ),
        head=nnx.Dict(w=nnx.Param(jnp.full(3, shift)), b=nnx.BatchStat(jnp.ones(1))),
        key=nnx.RngKey(jax.random.key(0), tag="x"),
        ref=nnx.Param(jnp.full(2, shift), ref=True),
    )


def failure(node, state, **options):
    before = str(nnx.state(node))
    with pytest.raises(nnx.errors.StateMismatchError) as caught:
        load_state(node, state, **options)
    assert str(nnx.state(node)) == before
    return caught.value


def test_variables_keep_identity_type_and_metadata_and_get_values():
    node = nnx.Dict(w=nnx.Param(jnp.zeros(2), tag="own"))
    kept = node.w
    done = load_state(node, {"w": nnx.BatchStat(jnp.ones(2), tag="other")})
    assert node.w is kept and type(kept) is nnx.Param and kept.tag == "own"
    assert kept[...].tolist() == [1.0, 1.0] and done.loaded == 1
    assert (done.kept, done.dropped, done.cast) == ((), (), ())


@pytest.mark.parametrize("is_abstract", [False, True], ids=["concrete", "abstract"])
def test_what_may_be_missing_or_dropped_is_said_by_the_caller(is_abstract):
    state = nnx.to_pure_dict(nnx.state(model(1.0)))
    del state["head"]
    state["old_head"] = {"w": jnp.ones(5)}
    node = nnx.eval_shape(model) if is_abstract else model()
    error = failure(node, state)
    assert error.missing == (("head", "b"), ("head", "w"))
    assert error.unexpected == (("old_head", "w"),)
    assert "missing=" in str(error) and "unexpected=" in str(error)
    options = {"missing": ["head.w", nnx.BatchStat], "unexpected": "old_head.**"}
    if is_abstract:
        error = failure(node, state, **options)
        assert [x.path for x in error.misfits] == [("head", "b"), ("head", "w")]
        assert "no value to keep" in str(error)
        return
    done = load_state(node, state, **options)
    assert done.kept == (("head", "b"), ("head", "w"))
    assert done.dropped == (("old_head", "w"),) and done.loaded == 4
    assert node.head.w[...].tolist() == [0.0, 0.0, 0.0]
    assert node.layers[1].w[...].tolist() == [2.0, 2.0]


def test_keys_of_an_abstract_model_are_made_before_the_rest_is_loaded():
    make = lambda: nnx.Dropout(0.5, rngs=nnx.Rngs(0))  # noqa: E731
    node = nnx.eval_shape(make)
    assert "nnx.reseed" in str(failure(node, {}, missing=nnx.RngState))
    nnx.reseed(node, default=1, dropout=1)
    assert len(load_state(node, {}, missing=nnx.RngState).kept) == 2


def test_a_leaf_that_differs_is_left_out_if_both_options_say_so():
    state = nnx.to_pure_dict(nnx.state(model(1.0)))
    state["head"]["w"] = jnp.ones(7)
    node = model()
    for options in ({}, {"missing": "head.w"}, {"unexpected": "head.w"}):
        assert failure(node, state, **options).misfits[0].what == "shape"
    done = load_state(node, state, missing="head.w", unexpected="head.w")
    assert done.kept == done.dropped == (("head", "w"),)
    assert node.head.w[...].tolist() == [0.0, 0.0, 0.0]


def test_options_see_paths_as_the_object_spells_them():
    node = nnx.List([nnx.Param(jnp.zeros(1))])
    seen = []
    state = {"0": {"value": jnp.ones(1)}, "1": {"value": jnp.ones(2)}}
    done = load_state(node, state, unexpected=lambda path, x: seen.append(path) or True)
    assert seen == [(1,)] and done.dropped == ((1,),)


@tables.cases(
    "held, given, fits",
    (jnp.ones(2), jnp.full(2, 3, jnp.bfloat16), True),
    (jnp.ones(2, jnp.float16), np.full(2, 3.0), True),
    (np.ones(2), jnp.full(2, 3.0), True),
    (jnp.ones(2, jnp.int8), jnp.full(2, 3), True),
    (jnp.ones(2, jnp.int8), jnp.array([3, 300]), False),
    (jnp.ones(2, jnp.uint32), jnp.array([3, -1]), False),
    (jnp.ones(2, jnp.int4), jnp.full(2, 3, jnp.uint8), True),
    (jnp.ones(2, jnp.float16), jnp.full(2, 1e30), False),
    (jnp.ones(2), np.full(2, 1e300), False),
    (jnp.ones(2, jnp.float8_e4m3fn), jnp.full(2, 3, jnp.bfloat16), True),
    (jnp.ones(2, jnp.float8_e4m3fn), np.full(2, 1e5, jnp.bfloat16), False),
    (jnp.ones(2), jnp.full(2, 3), False),
    (jnp.ones(2, int), jnp.full(2, 3.0), False),
    (jnp.ones(2, bool), jnp.full(2, 1), False),
    (jnp.ones(2), jnp.full(2, 3, jnp.complex64), False),
    (jnp.ones(2, jnp.complex64), jnp.full(2, 3), False),
    (jax.random.key(0), jax.random.key(1, impl="rbg"), False),
    ([jnp.ones(2)], [jnp.full(2, 3, jnp.bfloat16)], True),
    ids=str,
)
def test_casts_are_asked_for_and_keep_the_kind(held, given, fits):
    node = nnx.Dict(x=nnx.Variable(held))
    assert failure(node, {"x": given}).misfits[0].what == "dtype"
    if not fits:
        failure(node, {"x": given}, cast=True)
        return
    assert load_state(node, {"x": given}, cast=True).cast == (("x",),)
    (before,), (after,) = map(jax.tree.leaves, (held, node.x.get_raw_value()))
    assert type(after) is type(before) and after.dtype == before.dtype
    assert np.asarray(after, np.float32).tolist() == [3.0, 3.0]


def test_infinities_stay_and_complex_numbers_have_two_parts():
    node = nnx.Dict(x=nnx.Param(jnp.ones(1, jnp.float16)))
    load_state(node, {"x": jnp.full(1, jnp.inf)}, cast=True)
    assert jnp.isinf(node.x[...]).all()
    node = nnx.Dict(x=nnx.Param(jnp.ones(1, jnp.complex64)))
    load_state(node, {"x": np.full(1, 1 + 2j)}, cast=True)
    failure(node, {"x": np.full(1, 1 + 1e300j)}, cast=True)


def test_donated_arrays_are_neither_taken_nor_kept():
    def make():
        return nnx.Dict(w=nnx.Param(jnp.ones(2)), b=nnx.Param(jnp.ones(2)))

    donated = make()
    donated.w[...].delete()
    error = failure(make(), nnx.state(donated))
    assert "w: float32[2] in the object, one that was donated" in str(error)
    with pytest.raises(nnx.errors.StateMismatchError, match="donated"):
        load_state(donated, {"b": jnp.ones(2)}, missing="w")


def test_scalars_become_arrays_where_the_object_has_them():
    node = nnx.Dict(x=nnx.Variable(jnp.zeros((), jnp.uint32)), y=nnx.Variable(1))
    load_state(node, {"x": 3, "y": 4})
    assert node.x[...].dtype == jnp.uint32 and node.x[...] == 3
    assert node.y.get_raw_value() == 4


def test_buffers_of_numpy_are_copied_and_arrays_of_jax_are_not():
    array, jax_array = np.ones((64, 64), np.float32), jnp.ones(2)
    node = nnx.Dict(a=nnx.Param(jnp.zeros((64, 64))), b=nnx.Param(jnp.zeros(2)))
    load_state(node, {"a": array, "b": jax_array})
    array[0, 0] = 5
    assert node.a[...][0, 0] == 1 and node.b.get_raw_value() is jax_array
    assert not node.a[...].committed


def make_placed():
    return zoo.Box(
        w=nnx.Param(jnp.zeros((4, 8)), out_sharding=("a", "b")),
        b=nnx.Param(jnp.zeros(3)),
        key=nnx.RngKey(jax.random.key(0), tag="x"),
    )


GIVEN = {
    "w": np.ones((4, 8), np.float32),
    "b": jax.device_put(np.ones(3, np.float32), jax.devices()[3]),
    "key": jax.random.key(1),
}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("form", ["concrete", "eval_shape", "get_abstract_model"])
def test_arrays_come_onto_the_shardings_that_the_object_has(kind, form):
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(kind, kind))
    if form == "get_abstract_model":
        node = nnx.merge(*nnx.get_abstract_model(make_placed, mesh))
        load_state(node, GIVEN)
    else:
        with jax.set_mesh(mesh):
            node = make_placed() if form == "concrete" else nnx.eval_shape(make_placed)
            load_state(node, GIVEN)
    for variable, spec in ((node.w, P("a", "b")), (node.b, P()), (node.key, P())):
        wanted = NamedSharding(mesh, spec)
        value = variable[...]
        assert isinstance(value.sharding, NamedSharding)
        assert value.sharding.is_equivalent_to(wanted, value.ndim)


def test_a_mesh_that_is_not_in_force_is_an_error_and_no_ignored_sharding():
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        node = nnx.eval_shape(make_placed)
    with pytest.raises(ValueError, match=r"(?s)not in force.*b: .*jax.set_mesh"):
        load_state(node, GIVEN)
    assert isinstance(node.w.get_raw_value(), jax.ShapeDtypeStruct)


def test_a_ref_is_written_through():
    node, other = model(), model(1.0)
    ref = node.ref.get_raw_value()
    load_state(node, other)
    assert node.ref.get_raw_value() is ref and ref[...].tolist() == [1.0, 1.0]


def test_models_optimizers_metrics_averages_and_streams():
    def make(seed):
        linear = nnx.Linear(2, 3, rngs=nnx.Rngs(seed))
        return {
            "model": linear,
            "optimizer": nnx.Optimizer(linear, optax.adam(0.1), wrt=nnx.Param),
            "average": nnx.EMA(linear, 0.9),
            "metric": nnx.MultiMetric(loss=nnx.metrics.Average("loss")),
            "rngs": nnx.Rngs(seed, noise=seed),
        }

    saved, node = make(1), make(2)
    saved["rngs"].noise()
    saved["metric"].update(loss=2.0)
    state = nnx.to_pure_dict(nnx.state(saved))
    assert load_state(node, state).kept == ()
    assert node["metric"].compute() == {"loss": 2.0}
    assert node["rngs"].noise.count[...] == 1
    part = {k: v for k, v in state.items() if k != "average"}
    assert {p[0] for p in failure(node, part).missing} == {"average"}


def test_an_abstract_state_has_no_values():
    node = nnx.Dict(w=nnx.Param(jnp.zeros(2)))
    abstract = nnx.eval_shape(lambda: nnx.Dict(w=nnx.Param(jnp.zeros(2))))
    assert failure(node, abstract).misfits[0].what == "value"
    assert failure(abstract, nnx.state(abstract)).misfits[0].what == "value"


def test_a_variable_as_the_root():
    variable = nnx.Param(jnp.zeros(2))
    for given in (np.ones(2, np.float32), nnx.Param(jnp.ones(2))):
        assert load_state(variable, given).loaded == 1
    assert isinstance(variable.get_raw_value(), jax.Array)
    failure(variable, jnp.ones(3))


@pytest.mark.parametrize("state", [None, 3, "path"])
def test_what_is_no_state_is_refused(state):
    with pytest.raises(TypeError, match=r"load_state expects a State"):
        load_state(model(), state)


def test_an_object_without_state_is_refused():
    with pytest.raises(TypeError, match="Unsupported type"):
        load_state(jnp.ones(2), {})


def test_values_are_loaded_under_jit():
    @jax.jit
    def load(state):
        node = nnx.Dict(w=nnx.Param(jnp.zeros(2)))
        load_state(node, state, cast=True)
        return node.w[...]

    assert load({"w": jnp.ones(2, jnp.bfloat16)}).dtype == jnp.float32
