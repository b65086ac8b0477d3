"""Sequential: how outputs become arguments."""

import jax
import jax.numpy as jnp
import pytest

import graftree as nnx


class Scale(nnx.Module):
    def __init__(self, factor):
        self.factor = nnx.Param(jnp.array(factor))

    def __call__(self, x, *, deterministic=False):
        return x if deterministic else x * self.factor


def test_layers_are_applied_in_order():
    assert nnx.Sequential(lambda x: x + 1, lambda x: x * 10)(2) == 30


def test_layers_are_kept_in_a_list():
    model = nnx.Sequential(Scale(2.0), jnp.sin)
    assert type(model.layers) is nnx.List and list(model) == list(model.layers)
    assert nnx.state(model)["layers"][0]["factor"][...] == 2
    with pytest.raises(TypeError):
        len(model)
    with pytest.raises(TypeError):
        model[0]


def test_tuples_become_positional_and_dicts_keyword_arguments():
    model = nnx.Sequential(
        lambda x: (x, 2), lambda a, b: {"a": a, "b": b}, lambda *, a, b: [a, b], list
    )
    assert model(1) == [1, 2]


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [
        ((), {}, None),
        ((1,), {}, 1),
        ((1, 2), {}, (1, 2)),
        ((), {"a": 1}, {"a": 1}),
        ((1,), {"a": 2}, 1),
    ],
)
def test_without_layers_the_arguments_are_returned(args, kwargs, expected):
    assert nnx.Sequential()(*args, **kwargs) == expected


def test_keyword_arguments_reach_all_layers_that_take_them():
    model = nnx.Sequential(Scale(2.0), Scale(3.0), lambda x: x)
    assert model(1.0) == 6 and model(1.0, deterministic=True) == 1


def test_first_layer_may_take_its_input_by_keyword():
    assert nnx.Sequential(lambda x, **kw: (x, kw))(x=1, b=2) == (1, {"b": 2})


def test_parameters_filled_by_position_are_not_filled_again():
    model = nnx.Sequential(lambda x: (x, x), lambda x, y, z=0: (x, y, z))
    assert model(1, y=5, z=6) == (1, 1, 6)


def test_unknown_keyword_arguments_are_dropped():
    assert nnx.Sequential(lambda x: x + 1, lambda x: x)(1, unknown=3) == 2


def test_layers_without_signature_get_no_keyword_arguments():
    assert nnx.Sequential(lambda x: (x, 3), max)(1, key=None) == 3


def test_name_from_output_and_call_is_an_error():
    model = nnx.Sequential(lambda x: {"a": x}, lambda a: a)
    message = r"Got multiple values for arguments \['a'\] in Sequential\[1\]"
    with pytest.raises(TypeError, match=message):
        model(1, a=2)


def test_layer_that_can_not_be_called_is_named():
    with pytest.raises(TypeError, match=r"Sequence\[1\] is not callable: 3"):
        nnx.Sequential(lambda x: x, 3)(1)


def test_list_of_layers_is_not_unpacked():
    with pytest.raises(TypeError, match=r"Sequence\[0\] is not callable"):
        nnx.Sequential([jnp.sin])(1.0)
    with pytest.raises(ValueError, match=r"(?s)Sequential\(\*layers\).*Found data"):
        nnx.Sequential([Scale(2.0)])


def test_model_goes_through_transforms():
    model = nnx.Sequential(Scale(2.0), Scale(3.0))
    grads = jax.grad(lambda model: model(1.0))(model)
    assert [layer.factor[...] for layer in grads] == [3, 2]


def test_has_keyword_arg_knows_the_kinds_of_parameters():
    def f(a, /, b, *c, d, **e):
        pass

    found = [name for name in "abcdez" if nnx.nn.sequential.has_keyword_arg(f, name)]
    assert found == ["b", "d"]
