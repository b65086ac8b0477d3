"""Metrics below `nnx.metrics`."""

import jax.numpy as jnp
from flax import nnx

metrics = nnx.metrics.MultiMetric(
    accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss")
)
logits = jnp.array([[1.0, 2.0], [3.0, 0.0]])
metrics.update(loss=jnp.array(0.5), logits=logits, labels=jnp.array([1, 1]))
metrics.update(loss=jnp.array(1.5), logits=logits, labels=jnp.array([1, 0]))
print({name: float(value) for name, value in metrics.compute().items()})
metrics.reset()
print(bool(jnp.isnan(metrics.compute()["loss"])))
