"""keras: its layers are modules of NNX, and ``fit`` trains them."""

import os

os.environ["KERAS_BACKEND"] = "jax"
os.environ["KERAS_NNX_ENABLED"] = "true"

import keras
import numpy as np

EPOCHS = 25
GOAL = 0.3


def build():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.layers.Input((8,)),
            keras.layers.Dense(32, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(3),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-2), loss)
    return (model,)


def train(model):
    random = np.random.default_rng(0)
    x = random.normal(size=(256, 8)).astype(np.float32)
    y = x[:, :3].argmax(-1)
    for _ in range(EPOCHS):
        history = model.fit(x, y, batch_size=64, verbose=0, shuffle=False)
        yield history.history["loss"][0]
