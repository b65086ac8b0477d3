"""``config=``: the description of a model, kept with its checkpoint."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from graftree import checkpoints, errors
from tests import tables

CONFIG = {
    "widths": [4, 8],
    "kernel": (3, 3),
    "labels": {0: "cat", 1: "dog"},
    "$name": "net",
    "bias": False,
    "rate": 1e-3,
    "limit": math.inf,
    "parent": None,
    "unicode": "\u00e9\u4e2d",
    "count": 2**80,
}


class Net(nnx.Module):
    def __init__(self, widths, *, bias, rngs):
        sizes = zip([2, *widths], widths, strict=False)
        self.layers = nnx.List(
            [nnx.Linear(a, b, use_bias=bias, rngs=rngs) for a, b in sizes]
        )


def rngs(seed=0):
    return nnx.Rngs(seed)


def test_a_model_is_made_again_from_what_was_saved(tmp_path):
    config = {"widths": [4, 3], "bias": False}
    model = Net(**config, rngs=nnx.Rngs(0))
    checkpoints.save(tmp_path / "a", model, config=config)
    config = checkpoints.config(tmp_path / "a")
    abstract = nnx.eval_shape(lambda: Net(**config, rngs=nnx.Rngs(0)))
    again = checkpoints.restore(tmp_path / "a", abstract)
    assert jax.tree.map(np.array_equal, nnx.state(again), nnx.state(model))
    assert nnx.graphdef(again) == nnx.graphdef(model)


@tables.cases("config", CONFIG, {}, [math.nan], "a", 0, (3, 3))
def test_it_comes_back_equal_and_of_the_same_types(tmp_path, config):
    checkpoints.save(tmp_path / "a", rngs(), config=config)
    assert repr(checkpoints.config(tmp_path / "a")) == repr(config)


def test_it_is_json_that_others_can_read(tmp_path):
    checkpoints.save(tmp_path / "a", rngs(), config={"width": 3, "names": ["a"]})
    note = json.loads((tmp_path / "a" / "_CHECKPOINT_METADATA").read_text())
    assert note["custom_metadata"] == {"config": {"width": 3, "names": ["a"]}}


def test_each_step_has_that_of_its_run(tmp_path):
    with checkpoints.Checkpoints(tmp_path, best="loss", config={"width": 3}) as kept:
        kept.save(1, rngs=rngs(), scores={"loss": 0.5})
        kept.save(2, rngs=rngs(), scores={"loss": 0.6})
    with checkpoints.Checkpoints(tmp_path, best="loss", config={"width": 4}) as kept:
        assert kept.restore_best(rngs=rngs()) == 1
        kept.save(3, rngs=rngs(), scores={"loss": 0.7})
    widths = {
        path: checkpoints.config(tmp_path / path)["width"]
        for path in ("", "1", "2", "3", "3/rngs", "1/rngs")
    }
    assert widths == {"": 4, "1": 3, "2": 3, "3": 4, "3/rngs": 4, "1/rngs": 3}


def test_without_one_it_is_none(tmp_path):
    checkpoints.save(tmp_path / "a", rngs())
    with checkpoints.Checkpoints(tmp_path / "run") as kept:
        kept.save(1, rngs=rngs())
    assert checkpoints.config(tmp_path / "a") is None
    assert checkpoints.config(tmp_path / "run") is None
    # As versions before this one wrote it, and Orbax alone.
    (tmp_path / "a" / "_CHECKPOINT_METADATA").unlink()
    assert checkpoints.config(tmp_path / "a") is None
    checkpoints.restore(tmp_path / "a", rngs(1))


def test_overwriting_replaces_it(tmp_path):
    checkpoints.save(tmp_path / "a", rngs(), config=1)
    checkpoints.save(tmp_path / "a", rngs(), config=2, overwrite=True)
    assert checkpoints.config(tmp_path / "a") == 2
    checkpoints.save(tmp_path / "a", rngs(), overwrite=True)
    assert checkpoints.config(tmp_path / "a") is None


class Width(int):
    pass


WRONG = [
    ({"a": [1, {2}]}, r"config\['a'\]\[1\] is a builtins.set"),
    ({"dtype": jnp.bfloat16}, r"config\['dtype'\] is a jax\.\S+\n.*'bfloat16'"),
    ({"n": np.int64(3)}, r"config\['n'\] is a numpy.int64\n.*int\(x\)"),
    ({"n": np.float64(3)}, r"config\['n'\] is a numpy.float64"),
    ({"n": Width(3)}, r"config\['n'\] is a .*\.Width"),
    ({"f": nnx.relu}, r"config\['f'\] is a "),
    ({"x": jnp.ones(2)}, r"config\['x'\] is a jax"),
    ({"x": {(1, b"a"): 1}}, r"config\['x'\], key \(1, b'a'\)\[1\] is a builtins.bytes"),
    (object(), r"config is a builtins.object"),
    ([{1}, 2, {3}], r"config\[0\] is a .*\n  config\[2\] is a "),
]


@tables.cases("config, message", *WRONG)
def test_what_json_can_not_hold_is_named_before_anything_is_written(
    tmp_path, config, message
):
    for call, name in (
        (lambda: checkpoints.save(tmp_path / "a", rngs(), config=config), "save"),
        (lambda: checkpoints.Checkpoints(tmp_path / "b", config=config), "Checkpoints"),
    ):
        with pytest.raises(
            TypeError, match=f"(?s){name}: part of the config.*{message}"
        ):
            call()
    assert [*tmp_path.iterdir()] == []


@tables.cases(
    "make, message",
    (lambda path: None, "There is no checkpoint at"),
    (lambda path: path.mkdir(), "is not a complete checkpoint"),
    (lambda path: path.write_text("{}"), "it is a file"),
)
def test_what_is_no_checkpoint_is_an_error(tmp_path, make, message):
    make(tmp_path / "a")
    with pytest.raises(errors.CheckpointError, match=message):
        checkpoints.config(tmp_path / "a")


def test_a_damaged_note_is_an_error(tmp_path):
    checkpoints.save(tmp_path / "a", rngs(), config=1)
    (tmp_path / "a" / "_CHECKPOINT_METADATA").write_text('{"custom_metadata": {')
    with pytest.raises(errors.CheckpointError, match="Reading .* failed"):
        checkpoints.config(tmp_path / "a")
