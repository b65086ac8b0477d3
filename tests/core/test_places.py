"""Messages name an object by where a running function reaches it (issue 12, §13)."""

import copy
import pickle

import jax
import pytest

import graftree as nnx
from tests import zoo


def message_of(write):
    with pytest.raises(nnx.errors.TraceContextError) as caught:
        jax.jit(lambda x: write())(1.0)
    return str(caught.value)


@pytest.mark.parametrize("transform", [jax.jit, nnx.jit])
def test_an_object_of_another_trace_is_named_by_where_it_was_reached(transform):
    # Issue 12: it said which type, not which of them.
    model = nnx.Dict(layers=nnx.List([zoo.Scale()]))

    def write(layer, x):
        layer.w[...] = layer.w[...] * x

    def rename(layer, x):
        layer.tag = "x"

    for change, where in ((write, "layers[0].w"), (rename, "layers[0]")):
        with pytest.raises(nnx.errors.TraceContextError) as caught:
            transform(lambda x, change=change: change(model.layers[0], x))(1.0)
        assert f"at model.{where}\n" in str(caught.value)


def test_the_longest_path_from_a_local_name_is_found():
    weight = nnx.Param(1.0)
    model = nnx.Dict(layers=nnx.List([nnx.Dict(weight=weight)]))
    assert "at model.layers[0].weight\n" in message_of(lambda: weight.set_value(2))
    message = message_of(lambda: setattr(model, "a", 2))
    assert "at model\n" in message and "'a'" in message
    model.back = model
    message = message_of(lambda: setattr(model.back.layers, "a", 2))
    assert "at model.layers\n" in message
    hidden = iter([nnx.Param(1.0)])
    assert "\n  at " not in message_of(lambda: next(hidden).set_value(2))


def test_the_dict_of_a_programs_names_is_no_part_of_a_path():
    names = {"model": zoo.Scale(), "message_of": message_of}
    exec("found = message_of(lambda: model.w.set_value(2))", names)
    assert "at model.w\n" in names["found"]


def test_snapshots_of_a_trace_are_taken_anew_by_copies():
    state, seen = nnx.tracers.TraceState(), []

    @jax.jit
    def f(given):
        copies = given, pickle.loads(pickle.dumps(given)), copy.deepcopy(given)
        seen.extend(copied.is_valid() for copied in copies)

    f(state)
    assert seen == [True, True, True] and copy.deepcopy(state).is_valid()
