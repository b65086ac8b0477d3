"""A small vision transformer tells on which side of a square the bright dot is."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

SIZE, PATCH, FEATURES, CLASSES = 16, 4, 48, 4
STEPS = 200
GOAL = 0.4


class Block(nnx.Module):
    def __init__(self, features: int, heads: int, *, rngs: nnx.Rngs):
        self.attention_norm = nnx.LayerNorm(features, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            heads, features, dropout_rate=0.05, decode=False, rngs=rngs
        )
        self.mlp_norm = nnx.LayerNorm(features, rngs=rngs)
        self.mlp = nnx.Sequential(
            nnx.Linear(features, 2 * features, rngs=rngs),
            nnx.gelu,
            nnx.Dropout(0.05, rngs=rngs),
            nnx.Linear(2 * features, features, rngs=rngs),
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class VisionTransformer(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        patches = (SIZE // PATCH) ** 2
        self.embed = nnx.Conv(
            1, FEATURES, (PATCH, PATCH), strides=(PATCH, PATCH), rngs=rngs
        )
        self.first = nnx.Param(jnp.zeros((1, 1, FEATURES)))
        self.positions = nnx.Param(
            nnx.initializers.normal(0.02)(rngs.params(), (1, patches + 1, FEATURES))
        )
        self.blocks = nnx.List(Block(FEATURES, 4, rngs=rngs) for _ in range(3))
        self.norm = nnx.LayerNorm(FEATURES, rngs=rngs)
        self.head = nnx.Linear(FEATURES, CLASSES, rngs=rngs)

    def __call__(self, pictures: jax.Array) -> jax.Array:
        x = self.embed(pictures).reshape(len(pictures), -1, FEATURES)
        first = jnp.broadcast_to(self.first[...], (len(x), 1, FEATURES))
        x = jnp.concatenate([first, x], axis=1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


def batch(key: jax.Array, count: int = 64) -> tuple[jax.Array, jax.Array]:
    """Pictures ``[count, SIZE, SIZE, 1]`` with a square and a dot beside it."""
    place_key, side_key = jax.random.split(key)
    centers = jax.random.randint(place_key, (count, 2), 5, SIZE - 5)
    sides = jax.random.randint(side_key, (count,), 0, CLASSES)
    steps = jnp.array([(-4, 0), (4, 0), (0, -4), (0, 4)])
    dots = centers + steps[sides]
    grid = jnp.stack(jnp.meshgrid(*[jnp.arange(SIZE)] * 2, indexing="ij"), axis=-1)

    def near(points, distance):
        away = jnp.abs(grid[None] - points[:, None, None]).max(-1)
        return (away <= distance).astype(jnp.float32)

    return (near(centers, 1) + 2 * near(dots, 0))[..., None], sides


@nnx.jit
def step(model, optimizer, metrics, pictures, labels):
    def loss_of(model):
        logits = model(pictures)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), logits

    (loss, logits), grads = nnx.value_and_grad(loss_of, has_aux=True)(model)
    metrics.update(logits=logits, labels=labels)
    optimizer.update(model, grads)
    return loss


def build():
    model = VisionTransformer(rngs=nnx.Rngs(0, dropout=1))
    schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, 20, STEPS)
    transformation = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    optimizer = nnx.Optimizer(model, transformation, wrt=nnx.Param)
    return model, optimizer, nnx.MultiMetric(accuracy=nnx.metrics.Accuracy())


def train(model, optimizer, metrics):
    model.train()
    for key in jax.random.split(jax.random.key(2), STEPS):
        yield step(model, optimizer, metrics, *batch(key))


if __name__ == "__main__":
    model, optimizer, metrics = build()
    for number, loss in enumerate(train(model, optimizer, metrics)):
        if number % 25 == 0:
            accuracy = metrics.compute()["accuracy"]
            print(f"step {number}: loss {loss:.3f}, accuracy {accuracy:.1%}")
            metrics.reset()
    model.eval()
    pictures, labels = batch(jax.random.key(3))
    print(f"without dropout: {(model(pictures).argmax(-1) == labels).mean():.1%}")
