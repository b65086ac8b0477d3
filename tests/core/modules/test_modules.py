"""Modules: attributes set on a whole model at once."""

import jax
import jax.numpy as jnp
import pytest

import graftree as nnx
from graftree.core.modules import modules


class Leaf(nnx.Module):
    def __init__(self, rate=0.5):
        self.rate = rate
        self.deterministic = False
        self.weight = nnx.Param(jnp.ones(2))


class Norm(nnx.Module):
    def __init__(self):
        self.use_running_average = False


class Model(nnx.Module):
    def __init__(self):
        self.leaf = Leaf()
        self.norms = nnx.List([Norm(), Norm()])
        self.plain = nnx.data([Leaf()])


def test_metaclass_is_the_one_of_pytrees_or_below():
    assert type(nnx.Module) is nnx.module.ModuleMeta
    assert issubclass(nnx.module.ModuleMeta, nnx.pytreelib.PytreeMeta)


def test_module_can_be_made_without_arguments_only():
    assert repr(nnx.Module()) == "Module()"
    with pytest.raises(TypeError):
        nnx.Module(1)


# ------------------------------------------------------------------- set_attributes


def test_set_attributes_reaches_all_modules_that_have_the_attribute():
    model = Model()
    assert model.set_attributes(deterministic=True) is None
    assert model.leaf.deterministic and model.plain[0].deterministic
    assert not hasattr(model.norms[0], "deterministic")


def test_set_attributes_matches_any_of_the_filters():
    model = Model()
    model.set_attributes(nnx.PathContains("plain"), Norm, rate=0.1)
    assert (model.leaf.rate, model.plain[0].rate) == (0.5, 0.1)


def test_set_attributes_names_what_was_found_nowhere():
    message = r"instance of the following attributes: \['a', 'b'\]"
    with pytest.raises(ValueError, match=message):
        Model().set_attributes(b=1, a=2, rate=0.1)


def test_set_attributes_looks_among_the_matching_modules_only():
    with pytest.raises(ValueError, match=r"\['rate'\]"):
        Model().set_attributes(Norm, rate=0.1)


def test_failed_set_attributes_changes_nothing():
    model = Model()
    with pytest.raises(ValueError, match="Could not find"):
        model.set_attributes(rate=0.1, unknown=1)
    assert model.leaf.rate == 0.5


def test_set_attributes_may_find_nothing_if_told_so():
    Model().set_attributes(unknown=1, raise_if_not_found=False)


def test_set_attributes_follows_shared_and_cyclic_references():
    leaf = Leaf()
    model = nnx.List([leaf, leaf])
    leaf.parent = model
    model.set_attributes(rate=0.1)
    assert leaf.rate == 0.1


def test_set_attributes_rejects_shared_variables_in_tree_mode():
    leaf = Leaf()
    with pytest.raises(ValueError, match="found at paths"):
        nnx.List([leaf, leaf]).set_attributes(rate=0.1, graph=False)
    assert leaf.rate == 0.5


def test_set_attributes_does_not_touch_other_pytrees():
    class Settings(nnx.Pytree):
        def __init__(self):
            self.rate = 0.5

    model = Model()
    model.settings = Settings()
    model.set_attributes(rate=0.1)
    assert model.settings.rate == 0.5


def test_set_attributes_of_an_outer_trace_raises():
    model = Model()
    with pytest.raises(nnx.errors.TraceContextError, match="Cannot mutate 'Leaf'"):
        jax.jit(lambda: model.set_attributes(rate=0.1))()
    assert model.leaf.rate == 0.5


# -------------------------------------------------------------------- train and eval


def test_train_and_eval_set_both_modes():
    model = Model()
    assert model.eval() is None
    assert model.leaf.deterministic and model.norms[1].use_running_average
    assert model.train() is None
    assert not model.leaf.deterministic and not model.norms[1].use_running_average


def test_train_and_eval_take_further_attributes():
    model = Model()
    model.eval(rate=0.0)
    assert model.leaf.rate == 0.0


def test_train_and_eval_do_not_mind_models_without_modes():
    nnx.List([1]).train()
    nnx.List([1]).eval(unknown=1)


@pytest.mark.parametrize("method", ["train", "eval"])
def test_train_and_eval_refuse_their_own_attributes(method):
    with pytest.raises(TypeError, match="deterministic"):
        getattr(Model(), method)(deterministic=True)


# ------------------------------------------------------------------------- iteration


@pytest.mark.parametrize("name", ["iter_modules", "iter_children"])
def test_iteration_methods_equal_the_functions_and_warn(name):
    model = Model()
    iterator = getattr(model, name)()
    with pytest.warns(DeprecationWarning, match=name):
        listed = list(iterator)
    expected = list(getattr(nnx, name)(model))
    assert [key for key, _ in listed] == [key for key, _ in expected]
    assert all(a is b for (_, a), (_, b) in zip(listed, expected, strict=True))


def test_modules_come_before_their_parents_with_indices_in_paths():
    paths = [path for path, _ in nnx.iter_modules(Model())]
    assert paths == [
        ("leaf",),
        ("norms", 0),
        ("norms", 1),
        ("norms",),
        ("plain", 0),
        (),
    ]


# ------------------------------------------------------------------------ first_from


def test_first_from_returns_the_first_that_is_not_none():
    assert modules.first_from(None, 0, 1, error_msg="none given") == 0


def test_first_from_raises_its_message():
    with pytest.raises(ValueError, match="none given"):
        modules.first_from(None, None, error_msg="none given")
