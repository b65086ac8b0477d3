"""Fine-tuning by low-rank updates: a trained network learns a turned task.

Only the ``nnx.LoRAParam`` are trained; all other weights stay as they are.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

FEATURES, CLASSES = 16, 4
STEPS = 200
GOAL = 0.25


class Classifier(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.inner = nnx.Linear(FEATURES, 64, rngs=rngs)
        self.outer = nnx.Linear(64, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.outer(nnx.relu(self.inner(x)))


def batch(key: jax.Array, turn: int) -> tuple[jax.Array, jax.Array]:
    """Points around four corners; ``turn`` renames the corners."""
    label_key, noise_key = jax.random.split(key)
    labels = jax.random.randint(label_key, (64,), 0, CLASSES)
    corners = jnp.repeat(jnp.eye(CLASSES), FEATURES // CLASSES, axis=1)
    x = corners[labels] + 0.4 * jax.random.normal(noise_key, (64, FEATURES))
    return x, (labels + turn) % CLASSES


@nnx.jit(static_argnames="wrt")
def step(model, optimizer, x, labels, wrt):
    def loss_of(model):
        losses = optax.softmax_cross_entropy_with_integer_labels(model(x), labels)
        return losses.mean()

    loss, grads = nnx.value_and_grad(loss_of, argnums=nnx.DiffState(0, wrt))(model)
    optimizer.update(model, grads)
    return loss


def adapt(model: Classifier, rngs: nnx.Rngs) -> None:
    """Replaces each linear layer of a model by one with a low-rank update."""
    for name, layer in list(vars(model).items()):
        if isinstance(layer, nnx.Linear):
            adapted = nnx.LoRA(
                layer.in_features, 4, layer.out_features, base_module=layer, rngs=rngs
            )
            setattr(model, name, adapted)


def build():
    model = Classifier(rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    for key in jax.random.split(jax.random.key(1), 100):
        step(model, optimizer, *batch(key, turn=0), wrt=nnx.Param)
    adapt(model, nnx.Rngs(2))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.LoRAParam)


def train(model, optimizer):
    kernel = model.inner.base_module.kernel[...]
    for key in jax.random.split(jax.random.key(3), STEPS):
        yield step(model, optimizer, *batch(key, turn=1), wrt=nnx.LoRAParam)
    assert (model.inner.base_module.kernel[...] == kernel).all()


if __name__ == "__main__":
    for number, loss in enumerate(train(*build())):
        if number % 25 == 0:
            print(f"step {number}: loss {loss:.3f}")
