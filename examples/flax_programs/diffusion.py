"""A diffusion model: a U-Net learns to tell the noise in pictures of discs."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

SIZE, LEVELS = 16, 100
STEPS = 120
GOAL = 0.12  # mean squared error of the noise, which has variance 1


class ConvBlock(nnx.Module):
    def __init__(self, inputs: int, outputs: int, times: int, *, rngs: nnx.Rngs):
        self.norm = nnx.GroupNorm(inputs, num_groups=4, rngs=rngs)
        self.inner = nnx.Conv(inputs, outputs, (3, 3), rngs=rngs)
        self.time = nnx.Linear(times, outputs, rngs=rngs)
        self.outer = nnx.Conv(
            outputs, outputs, (3, 3), kernel_init=nnx.initializers.zeros, rngs=rngs
        )
        self.skip = nnx.Conv(inputs, outputs, (1, 1), use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array, time: jax.Array) -> jax.Array:
        y = self.inner(nnx.silu(self.norm(x))) + self.time(time)[:, None, None]
        return self.skip(x) + self.outer(nnx.silu(y))


class UNet(nnx.Module):
    def __init__(self, widths: tuple[int, ...] = (16, 32), *, rngs: nnx.Rngs):
        times = 32
        self.times = times
        self.time = nnx.Sequential(
            nnx.Linear(times, times, rngs=rngs),
            nnx.silu,
            nnx.Linear(times, times, rngs=rngs),
        )
        self.first = nnx.Conv(1, widths[0], (3, 3), rngs=rngs)
        pairs = list(zip(widths, (*widths[1:], widths[-1]), strict=True))
        self.down = nnx.List(ConvBlock(a, b, times, rngs=rngs) for a, b in pairs)
        self.middle = ConvBlock(widths[-1], widths[-1], times, rngs=rngs)
        self.up = nnx.List(
            ConvBlock(2 * b, a, times, rngs=rngs) for a, b in reversed(pairs)
        )
        self.widen = nnx.List(
            nnx.ConvTranspose(b, b, (2, 2), strides=(2, 2), rngs=rngs)
            for _, b in reversed(pairs)
        )
        self.last = nnx.Conv(widths[0], 1, (3, 3), rngs=rngs)

    def __call__(self, x: jax.Array, level: jax.Array) -> jax.Array:
        time = self.time(self.embed(level))
        x = self.first(x)
        skips = []
        for block in self.down:
            x = block(x, time)
            skips.append(x)
            x = nnx.avg_pool(x, (2, 2), strides=(2, 2))
        x = self.middle(x, time)
        for widen, block in zip(self.widen, self.up, strict=True):
            x = block(jnp.concatenate([widen(x), skips.pop()], axis=-1), time)
        return self.last(nnx.silu(x))

    def embed(self, level: jax.Array) -> jax.Array:
        rates = jnp.exp(-jnp.linspace(0, 4, self.times // 2))
        angles = level[:, None] * rates
        return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


def kept(level: jax.Array) -> jax.Array:
    """How much of a picture's variance is left at a level of noise."""
    return jnp.cos(0.5 * jnp.pi * (level + 1) / (LEVELS + 1)) ** 2


def discs(key: jax.Array, count: int) -> jax.Array:
    """Pictures ``[count, SIZE, SIZE, 1]`` of one disc, between -1 and 1."""
    place_key, size_key = jax.random.split(key)
    centers = jax.random.uniform(place_key, (count, 2), minval=5, maxval=SIZE - 5)
    radii = jax.random.uniform(size_key, (count,), minval=2, maxval=5)
    grid = jnp.stack(jnp.meshgrid(*[jnp.arange(SIZE)] * 2, indexing="ij"), axis=-1)
    distance = jnp.linalg.norm(grid[None] - centers[:, None, None], axis=-1)
    return jnp.tanh(radii[:, None, None] - distance)[..., None]


@nnx.jit
def step(model: UNet, optimizer: nnx.Optimizer, rngs: nnx.Rngs, x: jax.Array):
    level = jax.random.randint(rngs.level(), (len(x),), 0, LEVELS)
    noise = jax.random.normal(rngs.noise(), x.shape)
    share = kept(level)[:, None, None, None]
    noisy = jnp.sqrt(share) * x + jnp.sqrt(1 - share) * noise

    def loss_of(model):
        return jnp.mean((model(noisy, level) - noise) ** 2)

    loss, grads = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
    return loss


@nnx.jit(static_argnames="count")
def sample(model: UNet, rngs: nnx.Rngs, count: int) -> jax.Array:
    """New pictures, from noise, level by level."""

    def denoise(x, level):
        now, then = kept(level), jnp.where(level > 0, kept(level - 1), 1.0)
        noise = model(x, jnp.full((count,), level))
        picture = (x - jnp.sqrt(1 - now) * noise) / jnp.sqrt(now)
        picture = jnp.clip(picture, -1, 1)
        return jnp.sqrt(then) * picture + jnp.sqrt(1 - then) * noise, None

    x = jax.random.normal(rngs.noise(), (count, SIZE, SIZE, 1))
    return jax.lax.scan(denoise, x, jnp.arange(LEVELS)[::-1])[0]


def build():
    rngs = nnx.Rngs(0, noise=1, level=2)
    model = UNet(rngs=rngs)
    return model, nnx.Optimizer(model, optax.adam(2e-3), wrt=nnx.Param), rngs


def train(model, optimizer, rngs):
    for key in jax.random.split(jax.random.key(3), STEPS):
        yield step(model, optimizer, rngs, discs(key, 32))


if __name__ == "__main__":
    model, optimizer, rngs = build()
    for number, loss in enumerate(train(model, optimizer, rngs)):
        if number % 20 == 0:
            print(f"step {number}: loss {loss:.3f}")
    for row in sample(model, rngs, 1)[0, ::2, :, 0]:
        print("".join(" .:oO@"[int(jnp.clip(3 * (pixel + 1), 0, 5))] for pixel in row))
