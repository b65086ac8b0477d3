"""WAV files, as the model takes them."""

import pathlib
import wave

import numpy as np

from examples.speech import model

EXAMPLE = pathlib.Path(__file__).parent / "recording.wav"


def read(path: pathlib.Path) -> np.ndarray:
    """Reads a recording: 16 kHz, mono, 16 bits.

    Returns:
        The samples, ``float32[samples]`` from -1 to 1.

    Raises:
        ValueError: If it is another kind of file, or has no samples.
        OSError: If it can't be read.
    """
    try:
        with wave.open(str(path), "rb") as file:
            rate, channels = file.getframerate(), file.getnchannels()
            bits = 8 * file.getsampwidth()
            data = file.readframes(file.getnframes())
    except (wave.Error, EOFError) as error:
        reason = f"{path} can't be read as WAV: {str(error) or 'it ends too early'}."
        raise ValueError(reason + _way_out(path)) from error
    if (rate, bits, channels) != (model.SAMPLE_RATE, 16, 1):
        raise ValueError(
            f"{path} has {rate} Hz, {bits} bits and {channels} channel(s); the model "
            f"takes {model.SAMPLE_RATE} Hz, 16 bits and 1 channel.{_way_out(path)}"
        )
    if not data:
        raise ValueError(f"{path} has no samples.")
    return np.frombuffer(data, "<i2").astype(np.float32) / 2**15


def _way_out(path: pathlib.Path) -> str:
    return f"\nConvert it: sox {path} -r {model.SAMPLE_RATE} -c 1 -b 16 converted.wav"
