"""Silero's voice activity model: does somebody speak in these 32 ms?

Silero Team, 2024, "Silero VAD: pre-trained enterprise-grade Voice Activity Detector
(VAD), Number Detector and Language Classifier", https://github.com/snakers4/silero-vad.
Here is its part for 16 kHz.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

import graftree as nnx

SAMPLE_RATE = 16000
CHUNK = 512  # samples that get one probability
CONTEXT = 64  # samples before them that the model also sees
WINDOW, HOP, FREQUENCIES = 256, 128, 129
WIDTH = 128


class State(NamedTuple):
    """What the model keeps from one chunk for the next.

    Attributes:
        context: The last samples, ``[batch, CONTEXT]``.
        carry: That of the LSTM: two arrays ``[batch, WIDTH]``.
    """

    context: jax.Array
    carry: tuple[jax.Array, jax.Array]


class SpeechDetector(nnx.Module):
    """Magnitudes of frequencies, four convolutions, an LSTM over the chunks."""

    def __init__(self, *, rngs: nnx.Rngs):
        # A Fourier transform as kernels: all the real parts, then all the imaginary.
        self.fourier = nnx.Conv(
            1,
            2 * FREQUENCIES,
            kernel_size=WINDOW,
            strides=HOP,
            padding="VALID",
            use_bias=False,
            rngs=rngs,
        )
        self.encoder = nnx.List(
            [
                # With stride 2, "SAME" would pad just the end; PyTorch pads both.
                nnx.Conv(ins, outs, 3, strides=stride, padding=1, rngs=rngs)
                for ins, outs, stride in (
                    (FREQUENCIES, WIDTH, 1),
                    (WIDTH, WIDTH // 2, 2),
                    (WIDTH // 2, WIDTH // 2, 2),
                    (WIDTH // 2, WIDTH, 1),
                )
            ]
        )
        self.cell = nnx.OptimizedLSTMCell(WIDTH, WIDTH, rngs=rngs)
        # PyTorch's cell has a second bias, beside that of `dense_h`.
        self.cell.dense_i = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, 1, rngs=rngs)

    def init_state(self, batch: int) -> State:
        """The state before the first chunk: silence."""
        zeros = jnp.zeros((batch, WIDTH))
        return State(jnp.zeros((batch, CONTEXT)), (zeros, zeros))

    def __call__(self, state: State, chunk: jax.Array) -> tuple[State, jax.Array]:
        """Listens to a chunk of ``batch`` recordings.

        Args:
            state: What `init_state` or the chunk before gave.
            chunk: Samples from -1 to 1, ``[batch, CHUNK]``.

        Returns:
            The state for the next chunk, and the probabilities of speech, ``[batch]``.
        """
        audio = jnp.concatenate([state.context, chunk], axis=1)
        carry, x = self.cell(state.carry, self._encode(audio))
        probability = nnx.sigmoid(self.out(nnx.relu(x)))[:, 0]
        return State(audio[:, -CONTEXT:], carry), probability

    def _encode(self, audio: jax.Array) -> jax.Array:
        """Maps ``[batch, CONTEXT + CHUNK]`` to ``[batch, WIDTH]``."""
        audio = jnp.pad(audio, ((0, 0), (0, CONTEXT)), mode="reflect")
        real, imaginary = jnp.split(self.fourier(audio[..., None]), 2, axis=-1)
        x = jnp.sqrt(real**2 + imaginary**2)
        for layer in self.encoder:
            x = nnx.relu(layer(x))
        return x[:, 0]  # four windows at first, of which the strides leave one


@nnx.jit
def detect(model: SpeechDetector, audio: jax.Array) -> jax.Array:
    """Listens to whole recordings.

    Args:
        model: The model.
        audio: Samples from -1 to 1, ``[batch, samples]``; silence completes the last
            chunk.

    Returns:
        The probability of speech in each chunk, ``[batch, chunks]``.
    """
    batch, samples = audio.shape
    audio = jnp.pad(audio, ((0, 0), (0, -samples % CHUNK)))
    chunks = audio.reshape(batch, -1, CHUNK)
    _, probabilities = _listen(model, model.init_state(batch), chunks)
    return probabilities


@nnx.scan(in_axes=(None, nnx.Carry, 1), out_axes=(nnx.Carry, 1))
def _listen(
    model: SpeechDetector, state: State, chunk: jax.Array
) -> tuple[State, jax.Array]:
    return model(state, chunk)


WEIGHTS = {
    "stft_conv": "fourier",
    "conv1": "encoder[0]",
    "conv2": "encoder[1]",
    "conv3": "encoder[2]",
    "conv4": "encoder[3]",
    "lstm_cell.weight_ih": "cell.dense_i.kernel",
    "lstm_cell.weight_hh": "cell.dense_h.kernel",
    "lstm_cell.bias_ih": "cell.dense_i.bias",
    "lstm_cell.bias_hh": "cell.dense_h.bias",
    # A convolution over the one step that there is.
    "final_conv.weight": ("out.kernel", "o i 1 -> i o"),
    "final_conv.bias": "out.bias",
}
