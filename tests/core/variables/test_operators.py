"""Operators beyond those of the contract tests: both sides, NumPy, and the table."""

import numpy as np
import pytest

import graftree as nnx
from graftree.core.variables import operators


def test_numpy_on_the_left_leaves_the_operator_to_the_variable():
    out = np.ones(2) + nnx.Param(np.ones(2))
    assert isinstance(out, np.ndarray) and out.tolist() == [2.0, 2.0]


def test_arrays_convert_with_dtype_and_copy():
    buffer = np.ones(2)
    variable = nnx.Param(buffer)
    assert np.asarray(variable, dtype=np.int32).dtype == np.int32
    assert np.array(variable, copy=True) is not buffer


def test_operators_of_a_class_go_through_its_get_value():
    class Doubled(nnx.Variable):
        def get_value(self, **kwargs):
            return 2 * super().get_value(**kwargs)

    assert (Doubled(3) + 1, 1 - Doubled(3), -Doubled(3)) == (7, -5, -6)


def test_every_operator_has_its_name():
    for name in ("add", "radd", "matmul", "neg", "len", "iadd", "eq", "divmod"):
        method = getattr(operators.ValueOperators, f"__{name}__")
        assert method.__name__ == f"__{name}__"


def test_refused_operators_name_the_type_and_symbol():
    variable = nnx.BatchStat(1)
    with pytest.raises(NotImplementedError, match=r"(?s)\*\*=.*BatchStat"):
        variable **= 2


def test_format_without_a_spec_is_the_text_of_the_variable():
    assert f"{nnx.Param(1)}" == str(nnx.Param(1))
