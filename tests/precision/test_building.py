"""Policies for layers that are made in a context."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import zoo
from tests.precision.test_models import HALF, POLICY, Model, everything, output_dtype


def made(make, policy=POLICY, **options):
    with nnx.precision.default(policy, **options):
        return make()


@pytest.mark.parametrize("policy", [POLICY, HALF])
@pytest.mark.parametrize(
    "make",
    [
        lambda: Model(nnx.Rngs(0)),
        lambda: nnx.Conv(1, 2, (3,), rngs=nnx.Rngs(0)),
        lambda: nnx.LoRALinear(2, 3, lora_rank=1, rngs=nnx.Rngs(0)),
        lambda: nnx.RNN(nnx.SimpleCell(2, 3, rngs=nnx.Rngs(0)), rngs=False),
        lambda: nnx.RNN(nnx.LSTMCell(2, 3, rngs=nnx.Rngs(0)), rngs=False),
        lambda: nnx.Sequential(nnx.BatchNorm(2, rngs=nnx.Rngs(0)), nnx.relu),
        lambda: nnx.WeightNorm(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1)),
    ],
    ids=["model", "conv", "lora", "simple", "lstm", "norm", "weight norm"],
)
def test_a_model_is_as_if_the_policy_were_set_afterwards(make, policy):
    model, expected = made(make, policy), make()
    nnx.precision.set_policy(expected, policy)
    graphdef, state = everything(model)
    assert graphdef == everything(expected)[0]
    same = jax.tree.map(
        lambda a, b: a.dtype == b.dtype and np.array_equal(a, b),
        state,
        everything(expected)[1],
    )
    assert all(jax.tree.leaves(same))


def test_nothing_is_left_after_the_context_even_after_an_exception():
    with pytest.raises(KeyError), nnx.precision.default(HALF):
        raise KeyError
    assert nnx.Linear(2, 2, rngs=nnx.Rngs(0)).dtype is None
    with nnx.precision.default(POLICY):
        made(lambda: None, HALF)
        assert nnx.Linear(2, 2, rngs=nnx.Rngs(0)).kernel[...].dtype == jnp.float32


def test_arguments_of_the_caller_win():
    def make():
        return (
            nnx.Linear(2, 2, dtype=jnp.float16, rngs=nnx.Rngs(0)),
            nnx.Linear(2, 2, param_dtype=jnp.float32, rngs=nnx.Rngs(0)),
            nnx.Linear(2, 2, dtype=None, rngs=nnx.Rngs(0)),
            nnx.LayerNorm(2, dtype=jnp.float16, rngs=nnx.Rngs(0)),
            nnx.SimpleCell(2, 2, dtype=jnp.float32, rngs=nnx.Rngs(0)),
        )

    half, stored, unsaid, norm, cell = made(make, HALF)
    assert half.dtype is jnp.float16 and half.kernel[...].dtype == jnp.bfloat16
    assert stored.kernel[...].dtype == jnp.float32 and stored.dtype is jnp.bfloat16
    assert unsaid.dtype is jnp.bfloat16
    assert norm(jnp.ones((1, 2))).dtype == jnp.float16
    assert cell.dtype is cell.dense_i.dtype is jnp.float32
    assert cell.dense_i.kernel[...].dtype == jnp.bfloat16


def test_arguments_hold_for_the_layers_inside_a_layer():
    def make(**dtypes):
        return nnx.MultiHeadAttention(2, 4, rngs=nnx.Rngs(0), **dtypes)

    attention = made(lambda: make(dtype=jnp.float16), HALF)
    assert attention.query.dtype is attention.out.dtype is jnp.float16
    assert attention.query.kernel[...].dtype == jnp.bfloat16
    attention = made(lambda: make(param_dtype=jnp.float32), HALF)
    assert attention.out.kernel[...].dtype == jnp.float32
    lora = made(
        lambda: nnx.LoRALinear(
            2, 2, lora_rank=1, lora_dtype=jnp.float16, rngs=nnx.Rngs(0)
        )
    )
    assert lora.lora.dtype is jnp.float16 and lora.dtype is jnp.bfloat16


def test_what_a_class_chooses_for_its_base_wins():
    class Wide(nnx.Linear):
        def __init__(self, rngs):
            super().__init__(2, 2, dtype=jnp.float16, rngs=rngs)

    class Plain(nnx.Embed):
        def __init__(self, rngs):
            super().__init__(2, 2, rngs=rngs)

    assert made(lambda: Wide(nnx.Rngs(0))).dtype is jnp.float16
    assert made(lambda: Plain(nnx.Rngs(0))).dtype is jnp.bfloat16


def test_random_numbers_are_those_of_float32():
    expected = nnx.Linear(2, 3, rngs=nnx.Rngs(0)).kernel[...].astype(jnp.bfloat16)
    kernel = made(lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(0)), HALF).kernel[...]
    np.testing.assert_array_equal(kernel, expected)


def test_only_what_is_called_for_casts_its_output():
    def make():
        layers = [nnx.Linear(2, 2, rngs=nnx.Rngs(i)) for i in range(2)]
        return layers, nnx.Sequential(*layers)

    layers, model = made(make)
    x = jnp.ones((1, 2))
    assert model(x).dtype == jnp.float32
    assert layers[0](x).dtype == jnp.bfloat16


def test_what_was_made_elsewhere_stays_as_it_is():
    outside = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    model = made(lambda: nnx.Sequential(outside, nnx.Linear(2, 2, rngs=nnx.Rngs(1))))
    assert outside.dtype is None
    assert model.layers[1].dtype is jnp.bfloat16


def test_models_made_by_transforms_get_it_too(mode):
    @nnx.jit(**mode)
    def make():
        return Model(nnx.Rngs(0))

    plain = [make(), make()]
    model = made(make)
    assert model.head.dtype is jnp.bfloat16 and output_dtype(model) == jnp.float32
    assert [x.head.dtype for x in (*plain, make())] == [None] * 3
    assert made(make, "params=f32, compute=f16").head.dtype is jnp.float16
    abstract = made(lambda: nnx.eval_shape(lambda: Model(nnx.Rngs(0))), HALF)
    assert abstract.head.kernel.get_raw_value().dtype == jnp.bfloat16


def test_layers_made_under_vmap_in_a_constructor_get_it_too():
    class Layers(nnx.Module):
        def __init__(self):
            @nnx.vmap
            def make(rngs):
                return nnx.Linear(2, 2, rngs=rngs)

            self.layers = make(nnx.Rngs(0).split(3))
            self.stack = nnx.Stack(
                lambda rngs: nnx.Linear(2, 2, rngs=rngs), 3, rngs=nnx.Rngs(0)
            )

        def __call__(self, x):
            return self.stack(x)

    model = made(Layers)
    assert model.layers.dtype is jnp.bfloat16
    x = jnp.ones((1, 2), jnp.bfloat16)
    assert model(x).dtype == jnp.float32
    made_half = made(Layers, HALF)
    assert made_half.layers.kernel[...].dtype == jnp.bfloat16
    assert made_half(x).dtype == jnp.bfloat16


def test_exceptions_select_in_each_model():
    exceptions = {nnx.Embed: "compute=f32", "head": "compute=f16"}
    model = made(lambda: Model(nnx.Rngs(0)), exceptions=exceptions)
    assert model.embed.dtype is jnp.float32 and model.head.dtype is jnp.float16
    with pytest.raises(ValueError, match="exception Conv matches no module"):
        made(lambda: Model(nnx.Rngs(0)), exceptions={nnx.Conv: "compute=f32"})
    with pytest.raises(ValueError, match="lacks params"):
        made(lambda: None, "compute=f16")


def test_unknown_layers_are_warned_of_when_they_are_made():
    with pytest.warns(nnx.errors.UnknownLayerWarning, match="Scale") as caught:
        made(zoo.Scale)
    assert caught[0].filename == __file__


def test_other_threads_and_other_objects_do_not_notice():
    found = []

    def make():
        found.append(nnx.Linear(2, 2, rngs=nnx.Rngs(0)).dtype)

    with nnx.precision.default(POLICY):
        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
        assert nnx.Dict(a=1)["a"] == 1
    assert found == [None]


def test_a_constructor_that_fails_leaves_the_next_one_alone():
    with nnx.precision.default(POLICY):
        with pytest.raises(TypeError, match="in_features"):
            nnx.Linear()
        model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    assert model(jnp.ones((1, 2))).dtype == jnp.float32
