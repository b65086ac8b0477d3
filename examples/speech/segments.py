"""From the probability of speech in each chunk to the times at which somebody speaks.

The rule and its numbers are those of Silero's own function, but for the 30 ms that this
adds at both ends:

- Speech begins with a chunk whose probability is at least 0.5.
- It ends with the first chunk below 0.35, if another one below 0.35 begins 100 ms later
  or more, and none of 0.5 or more lies between.
- Speech of 250 ms or less is left out.
"""

from collections.abc import Sequence
from typing import NamedTuple

from examples.speech import model

START, STOP = 0.5, 0.35
MIN_SILENCE, MIN_SPEECH = 0.1, 0.25  # in seconds

SECONDS = model.CHUNK / model.SAMPLE_RATE


class Segment(NamedTuple):
    """A time of speech, in seconds."""

    start: float
    end: float


def of(probabilities: Sequence[float], seconds: float) -> list[Segment]:
    """Finds the segments of a recording of so many seconds."""
    found, start, quiet = [], None, None
    for chunk, probability in enumerate(probabilities):
        now = chunk * SECONDS
        if probability >= START:
            start, quiet = now if start is None else start, None
        elif probability < STOP and start is not None:
            quiet = now if quiet is None else quiet
            if now - quiet >= MIN_SILENCE:
                found.append(Segment(start, quiet))
                start = quiet = None
    if start is not None:
        found.append(Segment(start, seconds))
    return [segment for segment in found if segment.end - segment.start > MIN_SPEECH]
