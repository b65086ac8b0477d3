"""What came of it, as a picture."""

import pathlib
from collections.abc import Sequence

import numpy as np
from matplotlib import figure

from examples import pictures
from examples.speech import model, segments

WAVEFORM, PROBABILITY, SPEECH, *_ = pictures.COLORS


def draw(
    audio: np.ndarray,
    probabilities: np.ndarray,
    found: Sequence[segments.Segment],
    path: pathlib.Path,
) -> None:
    """Writes a picture of a recording and of where somebody speaks to ``path``."""
    seconds = len(audio) / model.SAMPLE_RATE
    picture = figure.Figure(figsize=(10, 5), layout="constrained")
    above, below = picture.subplots(2, 1, height_ratios=(3, 2), sharex=True)
    low, high, middles = _extremes(audio)
    above.fill_between(middles, low, high, color=WAVEFORM, lw=0.5)
    above.set_ylabel("amplitude")
    above.set_title(f"{len(found)} segments of speech in {seconds:.1f} s")
    # The probability of a chunk holds for all of it.
    edges = np.arange(len(probabilities) + 1) * segments.SECONDS
    below.stairs(probabilities, edges, baseline=None, color=PROBABILITY, lw=1.5)
    below.set(ylabel="probability of speech", xlabel="seconds", ylim=(-0.03, 1.03))
    for level, word in ((segments.START, "starts"), (segments.STOP, "stops")):
        below.axhline(level, color="gray", lw=0.8, ls="--")
        below.annotate(
            word,
            (1, level),
            xycoords=("axes fraction", "data"),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            color="gray",
            fontsize=8,
        )
    for plot in (above, below):
        for start, end in found:
            plot.axvspan(start, end, color=SPEECH, alpha=0.15, lw=0, zorder=0)
        plot.set_axisbelow(True)
        pictures.tidy(plot)
    below.set_xlim(0, seconds)
    pictures.write(picture, path)


def _extremes(audio: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The least and the greatest sample of each of about 2000 parts, and its time."""
    size = max(1, len(audio) // 2000)
    starts = np.arange(0, len(audio), size)
    low, high = np.minimum.reduceat(audio, starts), np.maximum.reduceat(audio, starts)
    return low, high, (starts + size / 2) / model.SAMPLE_RATE
