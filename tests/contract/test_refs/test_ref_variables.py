"""Variables whose value is in a ref (section 12.2), and copies of models of these."""

import copy
import pickle

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import graftree as nnx
from tests import tables
from tests.comparisons import raises
from tests.zoo import Box


def backed(value=(1.0, 2.0), **metadata):
    return nnx.Param(jnp.array(value), ref=True, **metadata)


def model_in_refs():
    """Two ref-backed Variables, a plain one, and a bare ref."""
    refs = {"a": backed(), "b": backed((3.0, 4.0, 5.0))}
    return Box(**refs, plain=nnx.Param(jnp.zeros(2)), bare=jax.new_ref(jnp.zeros(2)))


# ------------------------------------------------------------------- construction


@pytest.mark.parametrize("value", [1, 2.5, True, np.arange(3.0), np.float32(2)])
def test_arrays_and_scalars_can_be_in_a_ref(value):
    variable = nnx.Param(value, ref=True)
    assert variable.ref and isinstance(variable.get_raw_value(), jax.Ref)
    assert np.array_equal(variable[...], jnp.asarray(value))


@pytest.mark.parametrize("value", [{"a": jnp.ones(2)}, [1.0], (1.0,), "text", None])
def test_nothing_else_can_be_in_a_ref(value):
    with pytest.raises(TypeError):
        nnx.Param(value, ref=True)


@tables.cases(
    "wrap", lambda r: r, lambda r: {"a": [r]}, lambda r: [1, r], nnx.VariableMetadata
)
def test_a_ref_is_no_value(wrap):
    message = "Cannot pass a Ref directly into Variable constructor"
    with pytest.raises(ValueError, match=message):
        nnx.Param(wrap(jax.new_ref(jnp.ones(2))))


def test_keys_can_be_in_a_ref():
    variable = nnx.RngKey(jax.random.key(0), ref=True)
    variable[...] = jax.random.key(1)
    assert variable[...] == jax.random.key(1)


@pytest.mark.parametrize("name", ["ref", "hijax"])
def test_flags_are_read_only(name):
    variable = backed()
    flipped = not getattr(variable, name)
    for change in (
        lambda: variable.set_metadata(**{name: flipped}),
        lambda: variable.set_metadata(name, flipped),
        lambda: variable.del_metadata(name),
    ):
        with pytest.raises(ValueError, match=f"`{name}`"):
            change()
    with pytest.raises(AttributeError):
        setattr(variable, name, flipped)


# --------------------------------------------------------------- reading and writing


def test_reading_gives_arrays_but_leaves_are_the_ref_under_the_key_value():
    variable = backed()
    [(path, leaf)] = jax.tree.leaves_with_path(variable)
    assert jax.tree_util.keystr(path) == ".value"
    assert leaf is variable.get_raw_value()
    for read in (variable[...], variable.get_value(), variable[0], variable + 1):
        assert isinstance(read, jax.Array) and not isinstance(read, jax.Ref)
    assert jnp.sum(variable) == 3.0


def test_writing_goes_into_the_ref():
    variable = backed()
    ref = variable.get_raw_value()
    variable[...] = jnp.zeros(2)
    variable[1] = 5.0
    assert variable.get_raw_value() is ref and ref[...].tolist() == [0.0, 5.0]
    variable.set_value(jnp.ones(2))
    assert variable.get_raw_value() is ref and ref[...].tolist() == [1.0, 1.0]


def test_attributes_are_those_of_the_array():
    variable = backed(jnp.ones((2, 3)))
    assert (variable.shape, variable.ndim, variable.dtype) == ((2, 3), 2, jnp.float32)
    assert variable.T.shape == (3, 2) and variable.sum() == 6.0
    assert variable.at[0].set(0.0).tolist() == [[0.0] * 3, [1.0] * 3]
    transposed = jax.jit(lambda v: (v.T, v.at[0].add(1.0), v.astype(int)))(variable)
    assert [x.shape for x in transposed] == [(3, 2), (2, 3), (2, 3)]
    assert jax.eval_shape(lambda v: v[...] * 2, variable).shape == (2, 3)


def test_refs_are_told_from_arrays():
    is_array_ref = nnx.variablelib.is_array_ref
    ref = backed().get_raw_value()
    assert is_array_ref(ref) and not is_array_ref(ref[...]) and not is_array_ref(1)
    seen = []
    jax.jit(lambda r, x: seen.extend([is_array_ref(r), is_array_ref(x)]))(ref, 1.0)
    assert seen == [True, False]


def test_repr_shows_values_and_traced_shapes():
    variable = backed()
    assert "Array([1., 2.], dtype=float32)" in repr(variable)
    seen = []
    jaxpr = jax.make_jaxpr(lambda v: seen.append(repr(v)))(variable)
    assert "float32[2]" in seen[0] and "ref=True" in seen[0]
    assert not jaxpr.eqns  # looking at it changed no program


# ----------------------------------------------------------------- sharing and copies


def test_split_and_merge_share_the_refs():
    model = model_in_refs()
    merged = nnx.merge(*nnx.split(model))
    assert merged.a.get_raw_value() is model.a.get_raw_value()
    assert merged.bare is model.bare
    graphdef, state = nnx.split(model.bare)
    assert state is model.bare and nnx.merge(graphdef, state) is model.bare
    refs = nnx.graphlib.RefMap()
    nnx.graphlib.flatten(nnx.Dict(a=backed()), ref_index=refs)
    assert len(refs) == 3  # the Dict, its Variable and the ref of that


def test_duplicates_are_found_and_split_removes_them():
    model = model_in_refs()
    model.c = model.a
    model.other = model.bare
    assert nnx.find_duplicates(model) == [[("a",), ("c",)], [("bare",), ("other",)]]
    graphdef, state = nnx.split(model)

    @jax.jit
    def double(state):
        model = nnx.merge(graphdef, state)
        assert model.a is model.c and model.bare is model.other
        model.c[...] *= 2

    double(state)
    assert model.a[...].tolist() == [2.0, 4.0]


def test_clones_keep_what_is_shared_shared():
    model = nnx.Dict(a=backed())
    model.b = model.a
    model.c = jax.new_ref(jnp.zeros(2))
    model.d = model.c
    for copied in (nnx.clone(model), nnx.clone(model, arrays=True)):
        assert copied.a is copied.b and copied.c is copied.d
        assert copied.c is not model.c and copied.a is not model.a
    assert nnx.clone(model, variables=False).a is model.a


# --------------------------------------------------------------------------- update


@pytest.mark.parametrize("in_variable", [False, True])
def test_update_copies_one_ref_into_the_other(in_variable):
    model, new = model_in_refs(), nnx.Param(jnp.zeros(2), ref=True)
    ref = model.a.get_raw_value()
    nnx.update(model, {"a": new if in_variable else new.get_raw_value()})
    assert model.a.get_raw_value() is ref and model.a.ref
    assert ref[...].tolist() == [0.0, 0.0]


def test_update_of_a_bare_ref_writes_into_it():
    model = model_in_refs()
    ref = model.bare
    nnx.update(model, {"bare": jnp.ones(2)})
    assert model.bare is ref and ref[...].tolist() == [1.0, 1.0]


# What is written to a ref of three numbers, and what the message says.
MISFITS = {
    "shape": ("b", jnp.zeros(4), "shape"),
    "shape of a Variable": ("b", nnx.Param(jnp.zeros(4)), "shape"),
    "dtype": ("b", jax.random.key(0), "dtype"),
    "abstract": ("b", jax.ShapeDtypeStruct((3,), jnp.float32), "ShapeDtypeStruct"),
    "text": ("b", "text", "str"),
    "bare": ("bare", jnp.ones(3), "bare"),
}


@pytest.mark.parametrize(("name", "wrong", "word"), MISFITS.values(), ids=MISFITS)
def test_update_that_does_not_fit_changes_nothing(name, wrong, word):
    model = model_in_refs()
    new = {"a": jnp.zeros(2), name: wrong, "plain": jnp.ones(2)}
    with pytest.raises((ValueError, TypeError), match=word):
        nnx.update(model, new)
    assert model.a[...].tolist() == [1.0, 2.0]
    assert model.plain[...].tolist() == [0.0, 0.0]


def test_update_that_does_not_fit_names_the_path_and_both_types():
    with raises(ValueError, "Invalid shape", "0/b", "float32[3]", "float32[4]"):
        nnx.update([model_in_refs()], {0: {"b": jnp.zeros(4)}})


def test_update_from_state_keeps_ref_and_flag():
    variable = backed()
    ref = variable.get_raw_value()
    variable.update_from_state(nnx.BatchStat(jnp.zeros(2), tag="x"))
    assert variable.get_raw_value() is ref and variable.ref and variable.tag == "x"
    with pytest.raises(ValueError, match="Invalid shape"):
        variable.update_from_state(nnx.Param(jnp.zeros(3)))


def test_plain_variables_take_what_a_ref_holds():
    plain = nnx.Param(jnp.ones(2))
    nnx.update(plain, jax.new_ref(jnp.zeros(2)))
    assert isinstance(plain.get_raw_value(), jax.Array) and not plain.ref


def test_restored_arrays_make_an_abstract_model_ref_backed():
    abstract = nnx.Dict(a=nnx.Param(jax.ShapeDtypeStruct((2,), jnp.float32), ref=True))
    graphdef, state = nnx.split(abstract)
    merged = nnx.merge(graphdef, nnx.to_pure_dict(state))
    for model in (abstract, merged):
        nnx.update(model, {"a": np.ones(2, np.float32)})
        assert model.a.ref and model.a.has_ref
        model.a[...] += 1
        assert model.a[...].tolist() == [2.0, 2.0]


# ------------------------------------------------------------------ whole programs


@pytest.mark.parametrize("form", ["state", "pure dict"])
def test_checkpoints_are_restored_into_the_refs(form, tmp_path):
    model = nnx.Dict(a=backed(), b=nnx.Dict(c=backed((0.5, 0.5))))
    refs = [model.a.get_raw_value(), model.b.c.get_raw_value()]
    state = nnx.to_arrays(nnx.state(model))
    saved = state if form == "state" else nnx.to_pure_dict(nnx.state(model))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "model", saved)
        checkpointer.wait_until_finished()
        model.a[...], model.b.c[...] = jnp.zeros(2), jnp.zeros(2)
        target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), saved)
        restored = checkpointer.restore(tmp_path / "model", target)
    nnx.update(model, restored)
    assert [model.a.get_raw_value(), model.b.c.get_raw_value()] == refs
    assert refs[0][...].tolist() == [1.0, 2.0] and refs[1][...].tolist() == [0.5, 0.5]


def model_and_optimizer():
    rngs = nnx.Rngs(0, dropout=1)
    model = nnx.Sequential(
        nnx.Linear(2, 4, rngs=rngs),
        nnx.BatchNorm(4, rngs=rngs),
        nnx.Dropout(0.5, rngs=rngs),
        nnx.Linear(4, 1, rngs=rngs),
    )
    return model, nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)


IN_REFS = {
    "made with refs": nnx.use_refs(True)(model_and_optimizer),
    "converted": lambda: map(nnx.to_refs, model_and_optimizer()),
}


@pytest.mark.parametrize("make", IN_REFS.values(), ids=IN_REFS)
def test_a_model_trains_under_plain_jit_without_returning_anything(make):
    model, optimizer = make()
    traces = []

    @jax.jit
    def train_step(model, optimizer, x, y):
        traces.append(1)
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)

        def loss_fn(params):
            return ((nnx.merge(graphdef, params, rest)(x) - y) ** 2).mean()

        frozen = nnx.with_vars(params, ref=False)
        loss, grads = jax.value_and_grad(loss_fn)(frozen)
        optimizer.update(model, grads)
        return loss

    x = jnp.array([[0.0, 1.0], [1.0, 0.0], [2.0, 1.0], [0.5, 0.5]])
    y = x.sum(1, keepdims=True)
    losses = [float(train_step(model, optimizer, x, y)) for _ in range(20)]
    assert losses[-1] < losses[0]
    assert optimizer.step[...] == 20 and model.layers[2].rngs.count[...] == 20
    assert (model.layers[1].mean[...] != 0).all()
    assert len(traces) == 1


# ------------------------------------------------------------------ copies of models


def tied_model():
    w = backed(tag="x")
    return Box(w=w, w_tied=w, arrays=nnx.Variable(jnp.array(4.0)))


MAKERS = {
    "deepcopy": copy.deepcopy,
    "deepcopy in a dict": lambda x: copy.deepcopy({"a": x})["a"],
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "cloudpickle": lambda x: pickle.loads(cloudpickle.dumps(x)),
    "clone": nnx.clone,
    "clone arrays": lambda x: nnx.clone(x, arrays=True),
    "merge copy": lambda x: nnx.merge(*nnx.split(x), copy=True),
}
COPIES = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


@jax.jit
def add_one(variable):
    variable[...] += 1


@COPIES
def test_a_copy_of_a_model_has_refs_of_its_own(make):
    model = tied_model()
    copied = make(model)
    assert type(copied) is Box and copied.w_tied is copied.w is not model.w
    assert copied.w.ref and copied.w.get_metadata() == model.w.get_metadata()
    assert isinstance(copied.w.get_raw_value(), jax.Ref)
    assert not copied.arrays.ref
    add_one(copied.w)
    assert copied.w[...].tolist() == [2.0, 3.0]
    assert model.w[...].tolist() == [1.0, 2.0]


def test_a_deep_copy_has_bare_refs_of_its_own():
    model = nnx.Dict(bare=jax.new_ref(jnp.array(3.0)))
    copied = copy.deepcopy(model)
    add_one(copied.bare)
    assert copied.bare[...] == 4 and model.bare[...] == 3


def test_a_shallow_copy_shares_the_ref():
    variable = tied_model().w
    assert copy.copy(variable).get_raw_value() is variable.get_raw_value()


# ------------------------------------------------------------------------------ streams


def streams():
    with nnx.var_defaults(ref=True):
        return nnx.Rngs(0, params=1)


@tables.cases("split, size", (nnx.split_rngs, "splits"), (nnx.fork_rngs, "split"))
def test_streams_in_refs_are_split_into_new_ones_only(split, size):
    rngs = streams()
    key = rngs.params.key.get_raw_value()
    with pytest.raises(ValueError, match="held by refs"):
        split(rngs, **{size: 3})
    assert rngs.params.key.get_raw_value() is key and rngs.params.count[...] == 0
    new = split(rngs, **{size: 3}, graph_updates=False)
    expected = split(nnx.Rngs(0, params=1), **{size: 3}, graph_updates=False)
    assert new.params.key.shape == (3,) and rngs.params.key.shape == ()
    assert (new.params.key[...] == expected.params.key[...]).all()
    assert rngs.params.count[...] == 1


def test_a_single_fork_of_streams_in_refs_draws_on():
    rngs = streams()
    forked = rngs.fork()
    assert (forked.params() != rngs.params()).all() and rngs.params.count[...] == 2


def test_reseeding_writes_into_the_refs():
    rngs = streams()
    key = rngs.params.key.get_raw_value()
    rngs.params()
    nnx.reseed(rngs, params=5)
    assert rngs.params.key.get_raw_value() is key
    assert rngs.params.count[...] == 0
    assert rngs.params.key[...] == nnx.Rngs(params=5).params()
