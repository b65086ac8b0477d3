"""Names on disk: any tree comes back as it was, or is refused before a byte is written.

The keys are those that a file system, a path language or Orbax may read as their own.
"""

import os
import tempfile

import hypothesis
import jax
import jax.numpy as jnp
import pytest
from hypothesis import strategies as st

import graftree as nnx
from graftree import checkpoints
from tests import strategies

HOSTILE = ["", "/", ".", "..", "a", "a/", "/a", "a.", "a/b", "a.b", "1", "value", "~"]
HOSTILE += ["\0", "\ud800", "é", "%2F", ".zarray", "x" * 300, "_METADATA", "manifest"]
KEYS = st.one_of(
    st.sampled_from(HOSTILE), st.integers(-1, 2), st.text(max_size=3), st.booleans()
)
LEAVES = st.integers(1, 99).flatmap(
    lambda x: st.sampled_from([jnp.full(2, x), nnx.Param(jnp.full(1, x)), x])
)
# A State may have keys of several types, which JAX would not sort in a dict.
TREES = st.recursive(
    LEAVES, lambda x: st.dictionaries(KEYS, x, min_size=1, max_size=3), max_leaves=5
).filter(lambda x: isinstance(x, dict))


def content(state):
    return {
        path: jnp.asarray(leaf).tolist()
        for path, leaf in nnx.to_flat_state(nnx.as_pure(state))
    }


@strategies.examples(few=40, many=1000)
@hypothesis.given(TREES)
def test_every_tree_comes_back_or_is_refused_before_anything_is_written(tree):
    state = nnx.State(tree)
    with tempfile.TemporaryDirectory() as parent:
        folder = os.path.join(parent, "saved")
        try:
            checkpoints.save(folder, state)
        except (ValueError, TypeError) as error:
            assert "name" in str(error) or "sort" in str(error), error
            assert not os.listdir(parent)
            return
        like = jax.tree.map(lambda x: x * 0, state)
        assert content(checkpoints.restore(folder, like)) == content(state)


@pytest.mark.parametrize("key", ["", "/", "a/", "\ud800"])
def test_a_key_that_is_no_name_is_refused_with_its_path(tmp_path, key):
    with pytest.raises(ValueError, match="is no name on disk") as caught:
        checkpoints.save(tmp_path / "a", {key: jnp.ones(2), "b": jnp.ones(3)})
    assert repr((key,)) in str(caught.value) and "Rename" in str(caught.value)
    assert not os.listdir(tmp_path)


def test_a_leaf_can_not_have_the_name_of_a_folder(tmp_path):
    state = nnx.State({1: {"b": jnp.ones(2)}, "1": jnp.ones(2)})
    with pytest.raises(ValueError, match="the same name on disk, '1'"):
        checkpoints.save(tmp_path / "a", state)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("name", ["_METADATA", "_CHECKPOINT_METADATA", "__", "é.", ""])
def test_an_object_of_a_step_has_a_name_of_its_own(tmp_path, name):
    with checkpoints.Checkpoints(tmp_path) as series:
        with pytest.raises(ValueError, match="no name for a saved object"):
            series.save(1, **{name: nnx.Rngs(0)})
        assert series.steps() == []
