"""What a state has for an object: one comparison, one matcher; `update`."""

import collections
import pickle

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import graftree as nnx
from tests import comparisons, strategies, tables, zoo

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


def spelled(state):
    """The keys as checkpoints have them."""
    is_mapping = isinstance(state, dict)
    return {str(k): spelled(x) for k, x in state.items()} if is_mapping else state


def in_boxes(state):
    """A level below each Variable, as Orbax restores what it knows no types of."""
    flat = nnx.to_flat_state(state)
    leaves = [
        {"value": leaf.get_value()} if isinstance(leaf, nnx.Variable) else leaf
        for leaf in flat.leaves
    ]
    return nnx.to_pure_dict(nnx.from_flat_state(zip(flat.paths, leaves, strict=True)))


def boxed(node):
    """As Orbax restores it without a target: strings, and a level ``value``."""
    return spelled(in_boxes(nnx.state(node)))


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
    assert "This is the state of model" in str(failure(whole, nnx.state(part)))


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


def test_a_variable_as_the_root():
    variable = nnx.Param(ZEROS)
    for given in (ONES, nnx.Param(ONES), {"value": ONES}):
        nnx.update(variable, given, strict=True)
        assert variable[...].tolist() == [1.0, 1.0]
    assert "<root>: float32[2] in the object" in str(failure(variable, jnp.ones(3)))
    assert failure(variable, {}).missing == ((),)


def test_deep_objects_need_no_deep_stack():
    node = param = nnx.Param(jnp.ones(1))
    state = jnp.zeros(1)
    for _ in range(1500):
        node, state = nnx.Dict(x=node), {"x": state}
    nnx.update(node, state, strict=True)
    assert param[...] == 0.0


# ------------------------------------------------------ states are matched with objects

SOME = strategies.examples(few=30, many=300)
STATES = {
    "state": lambda state: state,
    "pure": nnx.to_pure_dict,
    "spelled": lambda state: spelled(nnx.to_pure_dict(state)),
    "boxed": in_boxes,
    "spelled boxes": lambda state: spelled(in_boxes(state)),
}


def raised(leaf):
    """A leaf with other numbers."""
    if isinstance(leaf, nnx.Variable):
        return leaf.copy(jax.tree.map(raised, leaf.get_value()))
    return leaf + 1 if isinstance(leaf, (jax.Array, np.ndarray)) else leaf


def updated(node, state, **options):
    """A copy of an object after an update, or the words of its error."""
    copy = nnx.clone(node)
    try:
        nnx.update(copy, state, **options)
    except ValueError as error:
        comparisons.check_same(copy, nnx.clone(node), comparisons.same_value)
        return str(error)
    return copy


def check_agree(a, b):
    if isinstance(a, str) or isinstance(b, str):
        assert a == b
    else:
        comparisons.check_same(a, b, comparisons.same_value)


@SOME
@hypothesis.given(strategies.graphs(refs=False), st.sampled_from([*STATES]))
def test_lax_and_strict_updates_agree_on_all_leaves(node, form):
    state = nnx.map_state(lambda _, leaf: raised(leaf), nnx.state(node))
    given = STATES[form](state)
    check_agree(updated(node, given), updated(node, given, strict=True))
    check_agree(updated(node, state), updated(node, given))


@SOME
@hypothesis.given(strategies.graphs(refs=False), st.sampled_from([*STATES]), st.data())
def test_what_is_missing_and_unexpected_is_told_and_nothing_else(node, form, data):
    flat = nnx.to_flat_state(nnx.state(node))
    arrays = [path for path, leaf in flat if isinstance(nnx.as_pure(leaf), jax.Array)]
    hypothesis.assume(arrays)
    dropped = data.draw(st.sampled_from(arrays))
    kept = [(path, leaf) for path, leaf in flat if path != dropped]
    given = STATES[form](nnx.from_flat_state([*kept, (("new",), jnp.ones(1))]))
    with pytest.raises(nnx.errors.StateMismatchError) as caught:
        nnx.update(node, given, strict=True)
    assert caught.value.missing == (dropped,)
    assert caught.value.unexpected == (("new",),)
    assert not caught.value.misfits


@pytest.mark.parametrize("strict", [False, True])
def test_an_update_names_the_first_place_that_cannot_be_set(strict):
    Pair = collections.namedtuple("Pair", "second first")
    node = nnx.Dict(c=nnx.data(Pair(jnp.ones(1), Pair(jnp.ones(1), jnp.ones(1)))))
    with pytest.raises(ValueError, match=r"Cannot set key 'first'.*'c/first/first'"):
        nnx.update(node, nnx.state(nnx.clone(node)), strict=strict)


# ------------------------------------------------------------------------------ updates


def test_strings_that_are_no_index_of_the_node_stay_strings():
    mixed, node = {0: nnx.Param(1.0)}, nnx.Dict(a=1)
    nnx.update(mixed, {"7": 2.0})
    nnx.update(node, {"7": 2.0})
    assert list(mixed) == [0, "7"] and node["7"] == 2.0


def test_attributes_of_classes_that_are_no_pytrees_are_known_by_their_values():
    variable = nnx.Param(1.0)
    node = zoo.Hidden(items=[variable], k=1)
    nnx.update(node, {"items": {0: 2.0}, "k": 3})
    assert node.items[0] is variable and variable.get_value() == 2.0 and node.k == 3


# ------------------------------------------------- issue 12: partial checkpoints


@tables.cases("held", ZEROS, np.zeros(2), jax.ShapeDtypeStruct((2,), jnp.float32))
def test_an_array_in_a_box_of_a_checkpoint_is_taken_out(held):
    model = nnx.Dict(layers=nnx.List([nnx.Dict(w=nnx.Param(held))]))
    given = {"layers": {"0": {"w": {"value": ONES}}}}
    for state in (given, nnx.State(given)):
        nnx.update(model, state)
        assert model.layers[0].w[...].tolist() == [1.0, 1.0]
    merged = nnx.merge(nnx.graphdef(model), given)
    assert merged.layers[0].w[...].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("is_ref", [False, True])
def test_mappings_for_arrays_are_listed_and_nothing_changes(is_ref):
    stat = nnx.BatchStat(jnp.zeros((2, 3)), ref=is_ref)
    model = nnx.Dict(a=nnx.Param(ZEROS), b=nnx.List([stat]), c=nnx.Param(np.zeros(1)))
    given = {"a": ONES, "b": {0: {"x": 1, "y": 2}}, "c": {"value": {"z": 3}}}
    where = "b/0: the BatchStat holds float32[2,3], got a dict with the keys 'x', 'y'"
    told = "can't take the place of an array", "c: the Param holds", where
    with comparisons.raises(ValueError, *told, "Pass the array at that path"):
        nnx.update(model, given)
    assert model.a[...].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("wrap", [lambda x: x, nnx.Param], ids=["raw", "Variable"])
@pytest.mark.parametrize("held", [ZEROS, jax.ShapeDtypeStruct((2,), "float32")])
def test_numpy_arrays_become_arrays_of_jax_unless_they_are_held(wrap, held):
    model = nnx.Dict(a=nnx.Param(held), b=nnx.Param(np.zeros(2)))
    given, own = np.ones(2, np.float64), np.ones(2)
    nnx.update(model, {"a": wrap(given), "b": own})
    assert model.b.get_raw_value() is own
    value = model.a.get_raw_value()
    assert isinstance(value, jax.Array) and value.dtype == jnp.float32
    given[:] = 5.0
    assert value.tolist() == [1.0, 1.0]


BOXED = {
    "number": (3, {"value": 3}, 3),
    "None": (None, {"value": None}, None),
    "list": ([1.0], {"value": [1.0]}, [1.0]),
    "mapping": ({"a": 1}, {"value": {"a": 2}}, {"a": 2}),
    # No box: the key is one of the value.
    "own key": ({"value": 1}, {"value": 3}, {"value": 3}),
    "anything": (None, {"value": 2}, {"value": 2}),
    "array": (None, {"value": jnp.ones(())}, 1.0),
}


@pytest.mark.parametrize(("held", "given", "expected"), BOXED.values(), ids=BOXED)
def test_boxes_of_values_that_are_no_arrays_are_taken_out(held, given, expected):
    model = {"x": nnx.Variable(held)}
    nnx.update(model, {"x": given})
    assert model["x"].get_raw_value() == expected


def test_the_bookkeeping_of_saved_modules_is_passed_over():
    def bias():
        return nnx.Dict(b=nnx.Param(ZEROS))

    saved = {"_pytree__state": None, "b": {"value": ONES}}
    model, state = bias(), nnx.state(bias())
    nnx.update(model, saved)
    nnx.update(bias(), saved, strict=True)
    nnx.replace_by_pure_dict(state, {"_pytree__state": None, "b": ONES})
    for found in (model.b, state["b"], nnx.merge(nnx.graphdef(model), saved).b):
        assert found[...].tolist() == [1.0, 1.0]
    for wrong in ({"_pytree__state": 1}, {"_pytree__nodes": {"b": True}}):
        with pytest.raises(ValueError, match="bookkeeping of the Dict"):
            nnx.update(model, wrong)
    assert list(nnx.state(model)) == ["b"]


def test_boxes_in_values_that_are_mappings_are_taken_out():
    held = {"a": jnp.zeros(1), "b": {0: jnp.zeros(1)}}
    model = {"x": nnx.Variable(held)}
    given = {"a": {"value": jnp.ones(1)}, "b": {"0": jnp.ones(1)}}
    for state in ({"x": given}, {"x": {"value": given}}, nnx.State({"x": given})):
        nnx.update(model, state)
        found = model["x"].get_raw_value()
        assert jax.tree.structure(found) == jax.tree.structure(held)
        assert found["b"][0].tolist() == [1.0]
    with pytest.raises(ValueError, match=r"x/a: the Variable holds float32\[1\]"):
        nnx.update(model, {"x": {"a": {"c": jnp.ones(1)}}})


REFUSED = {
    "a mapping can't take the place": (nnx.Variable(3), {"a": 1, "b": 2}),
    "got a Dict with the keys 'w'": (nnx.Param(ZEROS), nnx.Dict(w=nnx.Param(ONES))),
    r"x: the attribute holds float32\[2\]": (ZEROS, {"a": ONES}),
}


@pytest.mark.parametrize("phrase", REFUSED)
def test_mappings_for_what_is_none_are_refused(phrase):
    held, given = REFUSED[phrase]
    model = zoo.Box(x=held)
    with pytest.raises(ValueError, match=phrase):
        nnx.update(model, {"x": given})
    assert model.x is held and np.max(jax.tree.leaves(held)[0]) in (0, 3)


def test_boxes_for_array_attributes_are_taken_out():
    node = zoo.Hidden(x=ZEROS)
    nnx.update(node, {"x": {"value": ONES}})
    assert node.x.tolist() == [1.0, 1.0]


def test_a_flat_state_of_a_variable_is_its_value():
    variable = nnx.Param(ZEROS)
    for path in ((), ("value",)):
        flat = nnx.FlatState([(path, ONES)], sort=True)
        nnx.update(variable, flat)
        assert variable[...].tolist() == [1.0, 1.0]
        variable[...] = 0.0
