"""A List of equal layers becomes a Stack of the same values, and back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx


class Block(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(self.linear(x))


class Net(nnx.Module):
    def __init__(self, rngs, length=3):
        self.blocks = nnx.List([Block(rngs) for _ in range(length)])
        self.head = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x):
        if isinstance(self.blocks, nnx.Stack):
            return self.head(self.blocks(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


X = np.random.default_rng(0).normal(size=(2, 4)).astype("float32")


def leaves(model):
    data = jax.tree.map(
        lambda x: (
            jax.random.key_data(x)
            if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
            else x
        ),
        nnx.as_pure(nnx.state(model)),
    )
    return jax.tree.leaves(data)


def test_numbers_stay_and_the_way_back_gives_the_same_model():
    model, expected = Net(nnx.Rngs(0)), Net(nnx.Rngs(0))
    assert nnx.surgery.stack(model, "blocks") == [("blocks",)]
    assert model.blocks.layers.linear.kernel.shape == (3, 4, 4)
    np.testing.assert_allclose(model(X), expected(X), rtol=1e-5)
    assert nnx.surgery.unstack(model) == [("blocks",)]
    assert nnx.graphdef(model) == nnx.graphdef(expected)
    for found, leaf in zip(leaves(model), leaves(expected), strict=True):
        np.testing.assert_array_equal(found, leaf)
    model.blocks[0].linear.bias[...] = 1.0  # not read-only


def test_checkpoints_of_one_form_load_into_the_other(tmp_path):
    listed, stacked = Net(nnx.Rngs(0)), Net(nnx.Rngs(1))
    nnx.surgery.stack(stacked, "blocks")
    nnx.checkpoints.save(tmp_path / "list", listed)
    nnx.checkpoints.save(tmp_path / "stack", stacked)
    abstract = nnx.eval_shape(lambda: Net(nnx.Rngs(2)))
    from_list = nnx.checkpoints.restore(tmp_path / "list", abstract)
    nnx.surgery.stack(from_list, "blocks")
    nnx.surgery.stack(abstract, "blocks")
    from_stack = nnx.checkpoints.restore(tmp_path / "stack", abstract)
    nnx.surgery.unstack(from_stack)
    for found, model in ((from_list, listed), (from_stack, stacked)):
        np.testing.assert_allclose(found(X), model(X), rtol=1e-5)


def test_what_is_no_list_of_equal_layers_is_refused_and_stays():
    model = Net(nnx.Rngs(0))
    model.blocks[1].dropout.rate = 0.25
    with pytest.raises(ValueError, match=r"1 are not alike.\n  dropout/rate: 0.5"):
        nnx.surgery.stack(model, "blocks")
    model = Net(nnx.Rngs(0))
    model.blocks[1].linear.kernel = model.blocks[0].linear.kernel
    with pytest.raises(ValueError, match=r"shared.*\n.*linear.kernel"):
        nnx.surgery.stack(model, "blocks")
    model = Net(nnx.Rngs(0))
    model.first = model.blocks[0]
    with pytest.raises(ValueError, match=r"shared.*\n  \[0\]"):
        nnx.surgery.stack(model, "blocks")
    with pytest.raises(ValueError, match="a Linear is selected"):
        nnx.surgery.stack(model, "head")
    with pytest.raises(ValueError, match="a Linear is selected"):
        nnx.surgery.unstack(model, "head")
    assert isinstance(model.blocks, nnx.List)


def test_annotations_get_and_lose_the_axis_of_layers():
    def make(rngs):
        metadata = {"out_sharding": (None, "mlp"), "eager_sharding": False}
        return nnx.Linear(4, 4, kernel_metadata=metadata, rngs=rngs)

    rngs = nnx.Rngs(0)
    model = nnx.Dict(blocks=nnx.List([make(rngs) for _ in range(2)]))
    nnx.surgery.stack(model, "blocks", axis_name="layers")
    assert model.blocks.layers.kernel.out_sharding == ("layers", None, "mlp")
    nnx.surgery.unstack(model)
    assert model.blocks[1].kernel.out_sharding == (None, "mlp")
