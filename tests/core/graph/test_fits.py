"""What a state has for an object: one comparison, and `update` with ``strict``."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import graftree as nnx

# `update` itself takes no objects as deep as those that it compares.
from graftree.core.graph import fits

ONES, ZEROS = jnp.ones(2), jnp.zeros(2)


def model(shift=0.0):
    """Lists of more than ten, a container in a Variable, ``None``, a shared Module."""
    layers = [nnx.Dict(w=nnx.Param(jnp.full(2, i + shift))) for i in range(12)]
    return nnx.Dict(
        layers=nnx.List(layers),
        raw=nnx.data(jnp.full(1, shift)),
        nested=nnx.Variable({"a": jnp.full(1, shift), "b": [jnp.full(3, shift)]}),
        nothing=nnx.Variable(None),
        number=nnx.Variable(3),
        key=nnx.RngKey(jax.random.key(int(shift)), tag="x"),
        ref=nnx.Param(jnp.full(2, shift), ref=True),
        tied=layers[0],
    )


def boxed(node):
    """As Orbax restores it without a target: strings, and a level ``value``."""
    found = {}
    for path, leaf in nnx.to_flat_state(nnx.state(node)):
        is_box = isinstance(leaf, nnx.Variable)
        path = (*map(str, path), "value") if is_box else tuple(map(str, path))
        found[path] = leaf.get_value() if is_box else leaf
    return nnx.traversals.unflatten_mapping(found)


def numbers(node):
    """The leaves of an object in order, as lists of numbers."""
    leaves = jax.tree.leaves(nnx.as_pure(nnx.state(node)))
    is_key = [str(getattr(x, "dtype", "")).startswith("key") for x in leaves]
    return [
        np.asarray(jax.random.key_data(x) if is_key else x).tolist()
        for x, is_key in zip(leaves, is_key, strict=True)
    ]


def pair():
    return nnx.Dict(a=nnx.Param(ZEROS), b=nnx.Param(ZEROS))


FORMS = {
    "state": nnx.state,
    "pure dict": lambda x: nnx.to_pure_dict(nnx.state(x)),
    "boxes": boxed,
    "state of boxes": lambda x: nnx.State(boxed(x)),
    "flat state": lambda x: nnx.to_flat_state(nnx.state(x)),
    "graph state": nnx.unpack,
    "object": lambda x: x,
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("is_abstract", [False, True], ids=["concrete", "abstract"])
def test_every_form_of_a_state_fits_the_object_it_came_from(form, is_abstract):
    other = model(1.0)
    node = nnx.eval_shape(model) if is_abstract else model()
    nnx.update(node, form(other), strict=True)
    structures = [jax.tree.structure(nnx.as_pure(nnx.state(x))) for x in (node, other)]
    assert structures[0] == structures[1] and numbers(node) == numbers(other)


def failure(node, state):
    """The error of a strict update, which changes nothing."""
    before = jax.tree.leaves(nnx.state(node)), numbers(node)
    with pytest.raises(nnx.errors.StateMismatchError) as caught:
        nnx.update(node, state, strict=True)
    leaves = jax.tree.leaves(nnx.state(node))
    assert all(a is b for a, b in zip(before[0], leaves, strict=True))
    assert before[1] == numbers(node)
    return caught.value


def test_all_differences_are_listed_at_once():
    state = boxed(model())
    state["layers"]["3"]["w"]["value"] = jnp.ones((2, 2))
    state["layers"]["4"]["w"]["value"] = jnp.ones(2, jnp.bfloat16)
    state["key"]["value"] = jax.random.key_data(state["key"]["value"])
    state["layers_5"] = state["layers"].pop("5")
    state["nested"]["value"].pop("b")
    error = failure(model(), state)
    assert isinstance(error, ValueError)
    assert error.missing == (("layers", 5, "w"), ("nested", "b", 0))
    assert error.unexpected == (("layers_5", "w"),)
    assert [(x.path, x.what) for x in error.misfits] == [
        (("key",), "dtype"),
        (("layers", 3, "w"), "shape"),
        (("layers", 4, "w"), "dtype"),
    ]
    for line in (
        "missing: layers/5/w",
        "missing: nested/b/0",
        "unexpected: layers_5/w",
        "dtype: key: key<fry>[] in the object, uint32[2] in the state",
        "shape: layers/3/w: float32[2] in the object, float32[2,2] in the state",
        "dtype: layers/4/w: float32[2] in the object, bfloat16[2] in the state",
        "Renamed? layers/5/w is missing, layers_5/w unexpected.",
        "nnx.checkpoints.load_state",
    ):
        assert line in str(error)


def test_long_lists_are_cut_in_the_text_and_kept_through_pickle():
    node = nnx.List([nnx.Param(np.ones(1)) for _ in range(15)])
    assert "... and 5 more" in str(failure(node, {}))
    error = failure(node, {i: np.ones(2) for i in range(15)})
    assert "... and 5 more" in str(error) and len(error.misfits) == 15
    copied = pickle.loads(pickle.dumps(failure(nnx.Dict(a=node[0]), {"b": ONES})))
    assert (copied.missing, copied.unexpected) == ((("a",),), (("b",),))


def test_a_state_of_a_larger_or_smaller_object_is_told_so():
    part = pair()
    whole = nnx.Dict(model=part, step=nnx.Variable(jnp.array(0)))
    assert "The state has them below model" in str(failure(part, nnx.state(whole)))
    assert "The state is that of model" in str(failure(whole, nnx.state(part)))


FITTING = [
    *((jnp.float32(1), 2.0), (jnp.uint32(1), 2), (jnp.array(True), False)),
    *((3, jnp.array(4)), (3, 4), (ONES, np.ones(2, np.float32))),
    *((jnp.ones(()), jnp.asarray(1.0)), (jax.random.key(0), jax.random.key(1))),
    *(("text", "other"), ([ONES], [ONES])),
]
NOT_FITTING = [
    *((jnp.uint32(1), 2.0), (jnp.float32(1), 2), (jnp.array(1), False)),
    *((ONES, 1.0), (3, 4.0), (3, True), (ONES, np.ones(2))),
    *((np.ones(2), ONES), (None, ONES), (ONES, None)),
    (ONES, jax.ShapeDtypeStruct((2,), jnp.float32)),
    (jax.random.key(0), jax.random.key(1, impl="rbg")),
    (jax.random.key(0), np.array([0, 1], np.uint32)),
    *(("text", ONES), ([ONES], (jnp.ones(3),))),
    (ONES, [ONES]),
]


def forms_of(given):
    return {"x": given}, {"x": nnx.Param(given)}, {"x": {"value": given}}


@pytest.mark.parametrize(("held", "given"), FITTING, ids=str)
def test_what_fits_keeps_the_type_of_an_array(held, given):
    for state in forms_of(given):
        node = nnx.Dict(x=nnx.Variable(held))
        nnx.update(node, state, strict=True)
        if isinstance(held, jax.Array):
            assert node.x.get_raw_value().dtype == held.dtype


@pytest.mark.parametrize(("held", "given"), NOT_FITTING, ids=str)
def test_what_does_not_fit_is_refused(held, given):
    for state in forms_of(given):
        with pytest.raises(nnx.errors.StateMismatchError):
            nnx.update(nnx.Dict(x=nnx.Variable(held)), state, strict=True)


def test_shared_variables_may_be_at_any_of_their_paths():
    shared = nnx.Param(ZEROS)
    node = nnx.Dict(a=nnx.Dict(w=shared), b=nnx.Dict(w=shared))
    nnx.update(node, {"b": {"w": ONES}}, strict=True)
    assert shared[...].tolist() == [1.0, 1.0]
    twice = np.full(2, 2.0, np.float32)
    nnx.update(node, {"b": {"w": jnp.array(twice)}, "a": {"w": twice}}, strict=True)
    assert shared[...].tolist() == [2.0, 2.0]
    # Two tensors for one Variable: one of them would be dropped.
    error = failure(node, {"a": {"w": ONES}, "b": {"w": ZEROS}})
    assert error.unexpected == (("b", "w"),)


def test_bookkeeping_of_saved_modules_is_no_leaf():
    node = nnx.Dict(a=pair())
    inner = {"_pytree__state": None, "a": nnx.Param(ONES, tag="new"), "b": ONES}
    nnx.update(node, {"_pytree__state": None, "a": inner}, strict=True)
    assert numbers(node) == [[1.0, 1.0]] * 2 and node.a.a.tag == "new"


def test_plain_values_are_compared_as_the_mode_lists_them(graph):
    node = nnx.Dict(items=nnx.data([1, nnx.Param(ZEROS)]))
    with nnx.set_graph_mode(graph):
        nnx.update(node, nnx.state(node), strict=True)
        nnx.update(node, nnx.state(node, graph=False), strict=True)
        changed = {"items": {0: 2, 1: ONES}}
        if graph:
            assert failure(node, changed).unexpected == (("items", 0),)
        else:
            nnx.update(node, changed, strict=True)
            assert node["items"][0] == 2


def test_states_are_joined_before_they_are_compared():
    node = model()
    parts = nnx.state(model(1.0), nnx.Param, ...)
    nnx.update(node, *parts, strict=True)
    assert numbers(node) == numbers(model(1.0))


def test_a_model_with_its_optimizer():
    def make():
        linear = nnx.Dict(w=nnx.Param(ONES))
        return linear, nnx.Optimizer(linear, optax.adam(0.1), wrt=nnx.Param)

    saved, (linear, optimizer) = make(), make()
    saved[1].update(saved[0], nnx.state(saved[0]))
    nnx.update((linear, optimizer), nnx.state(saved), strict=True)
    assert optimizer.step[...] == 1 and optimizer.step.dtype == jnp.uint32
    nnx.update(optimizer, boxed(saved[1]), strict=True)
    error = failure(optimizer, nnx.state(saved[1], nnx.PathContains("opt_state")))
    assert error.missing == (("step",),)


def test_a_variable_as_the_root():
    variable = nnx.Param(ZEROS)
    for given in (ONES, nnx.Param(ONES), {"value": ONES}):
        nnx.update(variable, given, strict=True)
        assert variable[...].tolist() == [1.0, 1.0]
    assert "<root>: float32[2] in the object" in str(failure(variable, jnp.ones(3)))
    assert failure(variable, {}).missing == ((),)


def test_strict_updates_work_under_jit():
    @jax.jit
    def load(state):
        node = pair()
        nnx.update(node, state, strict=True)
        return node.a[...] * 2

    assert load({"a": {"value": ONES}, "b": ONES}).tolist() == [2.0, 2.0]
    with pytest.raises(nnx.errors.StateMismatchError, match="shape: a"):
        load({"a": np.ones(3, np.float32), "b": ONES})


def test_deep_objects_need_no_deep_stack():
    node, state = nnx.Param(jnp.ones(1)), jnp.zeros(1)
    for _ in range(3000):
        node, state = nnx.Dict(x=node), {"x": state}
    fit = fits.compare(node, state)
    assert fit.error("") is None and len(fit.pairs) == 1
