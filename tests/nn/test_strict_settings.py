"""Layers, metrics and optimizers work where JAX is told to be strict.

``jax.numpy_dtype_promotion("strict")`` refuses operations on two dtypes, and
``jax.transfer_guard("disallow")`` moves of values to the device that nobody asked for.
Both are for the program's own operations; a formula of ours is neither.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import graftree as nnx
from tests import catalog

STRICT = {
    "promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "transfers": lambda: jax.transfer_guard("disallow"),
}
strictly = pytest.mark.parametrize("setting", STRICT)
compiled_or_not = pytest.mark.parametrize("is_jitted", [False, True])


def same(x, y):
    """Whether two trees of arrays have the same dtypes and bits."""
    assert jax.tree.structure(x) == jax.tree.structure(y)
    for a, b in zip(*map(jax.tree.leaves, (x, y)), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(catalog.raw(a), catalog.raw(b))


def outcome(f, make, inputs, setting=None):
    """What a function gives, and the state that it leaves."""
    obj = make()
    if setting is None:
        out = f(obj, *inputs)
    else:
        with STRICT[setting]():
            out = f(obj, *inputs)
    return out, catalog.state_of(obj)


def check(f, make, inputs, setting, is_jitted):
    """The same outcome with the setting and without."""
    run = nnx.jit(f) if is_jitted else f
    same(outcome(run, make, inputs, setting), outcome(run, make, inputs))


DTYPES = {"inferred": {}, "half": {"dtype": jnp.bfloat16}}


def takes_dtype(row):
    """Whether a layer computes in a dtype; those that wrap others store in it."""
    return "dtype" in row.parameters() and not row.wraps


@compiled_or_not
@strictly
@pytest.mark.parametrize("dtype", DTYPES)
@catalog.every_family
def test_layers(row, dtype, setting, is_jitted):
    if DTYPES[dtype] and not takes_dtype(row):
        pytest.skip("the layer has no dtype")
    make = functools.partial(row.make, **DTYPES[dtype])
    check(row, make, row.inputs(), setting, is_jitted)


@catalog.every_family
def test_gradients_of_layers_in_half_precision(row):
    options = DTYPES["half"] if takes_dtype(row) else {}

    @nnx.jit
    @nnx.grad
    def gradient(layer, *inputs):
        outputs = jax.tree.leaves(row(layer, *inputs))
        return sum(jnp.sum(y.astype(jnp.float32)) for y in outputs)

    def run(layer, *inputs):
        return jax.tree.leaves(gradient(layer, *inputs))

    make = functools.partial(row.make, **options)
    check(run, make, row.inputs(), "promotion", is_jitted=False)


def test_operands_that_the_program_mixes_are_still_refused():
    layer = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    with jax.numpy_dtype_promotion("strict"):
        with pytest.raises(Exception, match="no available implicit dtype promotion"):
            layer(jnp.ones((2, 3), jnp.bfloat16))


VALUES = jnp.arange(8.0) / 4
LABELS = jnp.arange(8) % 3
LOGITS = jnp.sin(jnp.arange(24.0)).reshape(8, 3)
MASK = VALUES < 1
CLASSES = {"logits": LOGITS, "labels": LABELS}
SCORES = {"logits": LOGITS[:, 0], "labels": LABELS % 2}
METRICS = {
    "Average": (nnx.metrics.Average, {"values": VALUES}),
    "Welford": (nnx.metrics.Welford, {"values": VALUES}),
    "Accuracy": (nnx.metrics.Accuracy, CLASSES),
    "MultiMetric": (
        lambda: nnx.MultiMetric(a=nnx.metrics.Accuracy(), b=nnx.metrics.Average("b")),
        {**CLASSES, "b": VALUES},
    ),
    **{
        name: (getattr(nnx.metrics, name), {"predictions": VALUES, "targets": VALUES})
        for name in ("MeanSquaredError", "MeanAbsoluteError", "R2Score")
    },
    **{
        name: (
            functools.partial(getattr(nnx.metrics, name), 3, average="macro"),
            CLASSES,
        )
        for name in ("Precision", "Recall", "F1Score")
    },
    "ConfusionMatrix": (functools.partial(nnx.metrics.ConfusionMatrix, 3), CLASSES),
    "TopKAccuracy": (functools.partial(nnx.metrics.TopKAccuracy, 2), CLASSES),
    "Perplexity": (nnx.metrics.Perplexity, CLASSES),
    "RocAuc": (nnx.metrics.RocAuc, SCORES),
}


@compiled_or_not
@strictly
@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("name", METRICS)
def test_metrics(name, is_masked, setting, is_jitted):
    make, batch = METRICS[name]
    mask = {"mask": MASK} if is_masked else {}

    def run(metric, batch):
        metric.update(**batch, **mask)
        value = metric.compute()
        is_record = dataclasses.is_dataclass(value)
        return jax.tree.leaves(vars(value) if is_record else value)

    check(run, make, (batch,), setting, is_jitted)


@pytest.mark.parametrize("name", METRICS)
def test_metrics_are_reset(name):
    make, _ = METRICS[name]
    check(lambda metric: metric.reset(), make, (), "transfers", is_jitted=False)


OPTIMIZERS = {
    "sgd": optax.sgd(0.1, momentum=0.9),
    "adamw": optax.adamw(optax.cosine_decay_schedule(1e-3, 10)),
    "clipped": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)),
}


@compiled_or_not
@strictly
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name, dtype, setting, is_jitted):
    grads = nnx.state(nnx.Linear(3, 4, param_dtype=dtype, rngs=nnx.Rngs(1)))

    def make():
        model = nnx.Linear(3, 4, param_dtype=dtype, rngs=nnx.Rngs(0))
        return nnx.ModelAndOptimizer(model, OPTIMIZERS[name])

    def run(optimizer, grads):
        optimizer.update(grads)

    check(run, make, (grads,), setting, is_jitted)


@compiled_or_not
@strictly
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_averages_of_parameters(dtype, setting, is_jitted):
    model = nnx.Linear(3, 4, param_dtype=dtype, rngs=nnx.Rngs(1))

    def make():
        return nnx.EMA(nnx.Linear(3, 4, param_dtype=dtype, rngs=nnx.Rngs(0)), 0.9)

    def run(ema, model):
        ema.update(model)

    check(run, make, (model,), setting, is_jitted)
