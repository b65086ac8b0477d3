"""Which bytes a slice has: against what NumPy takes of the same array."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from graftree.weights import slices


@st.composite
def arrays_with_slices(draw):
    shape = draw(st.lists(st.integers(0, 4), max_size=5))
    index = []
    for size in shape:
        start, stop = sorted(draw(st.tuples(*[st.integers(0, size)] * 2)))
        index.append(draw(st.sampled_from([slice(None), slice(start, stop)])))
    array = np.arange(np.prod(shape, dtype=int), dtype=np.int32).reshape(shape)
    return array, tuple(index)


@hypothesis.given(arrays_with_slices())
def test_runs_are_the_bytes_of_the_slice_in_order(case):
    array, index = case
    data = array.tobytes()
    length, starts = slices.runs(slices.bounds_of(array.shape, index), 4)
    runs = [data[start : start + length] for start in starts]
    assert b"".join(runs) == array[index].tobytes()


@pytest.mark.parametrize(
    ("shape", "index", "length", "count"),
    [
        ((6, 4, 5), np.s_[1:3, :, :], 160, 1),
        ((6, 4, 5), np.s_[:, 1:2, :], 20, 6),
        ((6, 4, 5), np.s_[2:3, 1:3, :], 40, 1),
        ((6, 4, 5), np.s_[:, :, 1:2], 4, 24),
        ((), (), 4, 1),
    ],
)
def test_axes_taken_whole_make_runs_longer(shape, index, length, count):
    run, starts = slices.runs(slices.bounds_of(shape, index), 4)
    assert (run, len([*starts])) == (length, count)


@pytest.mark.parametrize("index", [np.s_[::2,], np.s_[:, :], ()])
def test_what_is_no_slice_of_step_one_is_refused(index):
    with pytest.raises(ValueError, match="no slice of step 1"):
        slices.bounds_of((4,), index)
