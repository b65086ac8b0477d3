"""Messages name an object by where a running function reaches it (issue 12, §13)."""

import copy
import pickle

import jax
import pytest

import graftree as nnx


def message_of(write):
    with pytest.raises(nnx.errors.TraceContextError) as caught:
        jax.jit(lambda x: write())(1.0)
    return str(caught.value)


@pytest.mark.parametrize("transform", [jax.jit, nnx.jit])
def test_an_object_of_another_trace_is_named_by_where_it_was_reached(transform):
    # Issue 12: it said which type, not which of them.
    model = nnx.Dict(layers=nnx.List([nnx.Linear(1, 1, rngs=nnx.Rngs(0))]))

    def write(layer, x):
        layer.kernel[...] = layer.kernel[...] * x

    def rename(layer, x):
        layer.tag = "x"

    for change, where in ((write, "layers[0].kernel"), (rename, "layers[0]")):
        with pytest.raises(nnx.errors.TraceContextError) as caught:
            transform(lambda x, change=change: change(model.layers[0], x))(1.0)
        assert f"at model.{where}\n" in str(caught.value)


def test_the_longest_path_from_a_local_name_is_found():
    weight = nnx.Param(1.0)
    model = nnx.Dict(layers=nnx.List([nnx.Dict(weight=weight)]))
    assert "at model.layers[0].weight\n" in message_of(lambda: weight.set_value(2))
    message = message_of(lambda: setattr(model, "a", 2))
    assert "at model\n" in message and "'a'" in message


def test_an_object_in_a_cycle_is_found_and_one_out_of_reach_is_not():
    model = nnx.Dict(inner=nnx.Dict())
    model.inner.back = model
    assert "at model.inner\n" in message_of(lambda: setattr(model.inner, "a", 2))
    hidden = iter([nnx.Param(1.0)])
    assert "\n  at " not in message_of(lambda: next(hidden).set_value(2))


def test_the_dict_of_a_programs_names_is_no_part_of_a_path():
    names = {"model": nnx.Linear(2, 3, rngs=nnx.Rngs(0)), "message_of": message_of}
    exec("found = message_of(lambda: model.kernel.set_value(2))", names)
    assert "at model.kernel\n" in names["found"]


def test_snapshots_of_a_trace_are_taken_anew_by_copies():
    state, seen = nnx.tracers.TraceState(), []

    @jax.jit
    def f(given):
        copies = given, pickle.loads(pickle.dumps(given)), copy.deepcopy(given)
        seen.extend(copied.is_valid() for copied in copies)

    f(state)
    assert seen == [True, True, True] and copy.deepcopy(state).is_valid()
