"""Messages name an object by where a running function reaches it (issue 12, §13)."""

import jax
import pytest

import graftree as nnx
from graftree.core import places


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
    assert places.find(weight) == "model.layers[0].weight"
    assert places.find(model) == "model"


def test_an_object_in_a_cycle_is_found_and_one_out_of_reach_is_not():
    model = nnx.Dict(inner=nnx.Dict())
    model.inner.back = model
    assert places.find(model.inner) == "model.inner"
    found = places.find(nnx.Param(1.0))
    assert found == ""


def test_the_dict_of_a_programs_names_is_no_part_of_a_path() -> None:
    names = {"model": nnx.Linear(2, 3, rngs=nnx.Rngs(0)), "find": places.find}
    exec("found = find(model.kernel)", names)
    assert names["found"] == "model.kernel"
