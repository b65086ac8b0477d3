"""`nnx.training.EarlyStopping`: when it stops, and that a checkpoint holds it."""

import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import tables

EarlyStopping = nnx.training.EarlyStopping
NAN, INF = float("nan"), float("inf")


# Options, scores, which of them are improvements, and after which it stops.
@tables.cases(
    "options, scores, improved, last",
    ({}, [3, 2, 2, 1, 4, 1, 0], "110100", 6),
    ({"mode": "max"}, [3, 2, 4, 4, 4], "10100", 5),
    ({"min_delta": 0.5}, [3, 2.5, 2.4, 2, 2], "10100", 5),
    ({}, [NAN, 1, NAN, NAN], "0100", 4),
    ({}, [INF, INF], "00", 2),
    ({}, [np.float32(2), jnp.array(1), jnp.array(1.0), 3], "1100", 4),
)
def test_it_stops_after_scores_without_an_improvement(options, scores, improved, last):
    stopping, found = EarlyStopping(2, **options), ""
    for score in scores:
        found += str(int(stopping.update(score)))
        if stopping.should_stop:
            break
    assert (found, len(found)) == (improved, last)


def test_a_checkpoint_holds_it_to_the_last_bit(tmp_path):
    stopping = EarlyStopping(2)
    best = 0.1 + 0.2  # in float32 another number
    stopping.update(best)
    stopping.update(1.0)
    with nnx.checkpoints.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, stopping=stopping)
        again = EarlyStopping(2)
        checkpoints.restore_latest(stopping=again)
    assert again.best_metric.get_value() == best
    assert not again.should_stop and not again.update(best) and again.should_stop
    assert EarlyStopping(2).best_metric.get_value() == INF


@tables.cases(
    "name, value", ("patience", 0), ("min_delta", -1), ("min_delta", NAN), ("mode", "a")
)
def test_wrong_options_are_named(name, value):
    with pytest.raises(ValueError, match=f"EarlyStopping expects {name}"):
        EarlyStopping(**{"patience": 1, name: value})


def test_a_traced_score_is_refused():
    stopping = EarlyStopping(1)
    with pytest.raises(TypeError, match=r"traced.*\nReturn it"):
        nnx.jit(lambda score: stopping.update(score))(1.0)
    assert not stopping.should_stop
