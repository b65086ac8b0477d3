"""The network: two convolutional blocks, then a classifier on top of them."""

import jax

import graftree as nnx
from examples.digits import data


class ConvBlock(nnx.Module):
    """Halves the image and looks at it with ``out_features`` filters."""

    def __init__(self, in_features: int, out_features: int, *, rngs: nnx.Rngs):
        self.conv = nnx.Conv(in_features, out_features, kernel_size=(3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(out_features, momentum=0.9, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``[batch, 2h, 2w, in_features]`` to ``[batch, h, w, out_features]``."""
        x = nnx.relu(self.norm(self.conv(x)))
        return nnx.max_pool(x, window_shape=(2, 2), strides=(2, 2))


class DigitClassifier(nnx.Module):
    """Scores an 8x8 image against the ten digits."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.block1 = ConvBlock(1, 32, rngs=rngs)
        self.block2 = ConvBlock(32, 64, rngs=rngs)
        self.hidden = nnx.Linear(2 * 2 * 64, 128, rngs=rngs)
        self.dropout = nnx.Dropout(0.4, rngs=rngs)
        self.output = nnx.Linear(128, data.CLASSES, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Maps images ``[batch, 8, 8, 1]`` to logits ``[batch, 10]``."""
        x = self.block2(self.block1(images))
        x = x.reshape(x.shape[0], -1)
        x = self.dropout(nnx.relu(self.hidden(x)))
        return self.output(x)
