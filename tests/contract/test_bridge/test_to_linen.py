"""Modules as Linen Modules: what is ours to promise beyond the peer."""

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests.interop.bridge.programs_to_linen import KEY, KEYS, X, simple


def without(tree, *path):
    """A copy of nested dicts without the entry at a path."""
    first, *rest = path
    if not rest:
        return {key: value for key, value in tree.items() if key != first}
    return {**tree, first: without(tree[first], *rest)}


class Bare(nnx.Module):
    """A Module without Variables."""

    def __init__(self, rngs):
        pass


class Counter(nnx.Module):
    def __init__(self, rngs):
        self.count = nnx.BatchStat(jnp.zeros(()))
        self.w = nnx.Param(rngs.params.normal((3,)))

    def __call__(self, x):
        self.count[...] += 1
        return x * self.w + self.count


# Paths of what is missing, and of the Variable that is named.
MISSING = [(("params", "lin", "bias"), "params/lin/bias")]
MISSING += [(("params",), "params/lin/kernel")]
MISSING += [(("batch_stats",), "batch_stats/norm/mean")]


@pytest.mark.parametrize(("path", "named"), MISSING)
def test_missing_variables_are_told(path, named):
    model = simple(nnx, 3, 4)
    v = model.init(KEYS, X)
    with pytest.warns(UserWarning, match="not in those given to apply") as caught:
        out = model.apply(without(v, *path), X)
    assert f"  - {named}" in str(caught[0].message)
    assert "mutable" in str(caught[0].message)
    assert out.shape == (4, 4)


def test_missing_variables_that_may_change_start_anew():
    model = nnx.bridge.to_linen(Counter)
    v = model.init(KEY, X)
    _, updates = model.apply({"params": v["params"]}, X, mutable=["batch_stats"])
    assert updates == {"batch_stats": {"count": 1.0}}


def test_unknown_variables_are_told_and_complete_ones_give_no_warning():
    model = simple(nnx, 3, 4)
    v = model.init(KEYS, X)
    extra = {**v, "params": {**v["params"], "new": {"kernel": X}}}
    with pytest.warns(UserWarning, match="Found unknown module paths") as caught:
        out = model.apply(extra, X)
    assert str(caught[0].message).endswith("\n  - new/kernel")
    assert (out == model.apply(v, X)).all()


def test_a_number_may_have_become_an_array():
    class Scale(nnx.Module):
        def __init__(self, rngs):
            self.scale = nnx.Param(2.0)

        def __call__(self, x):
            return x * self.scale.get_value()

    model = nnx.bridge.to_linen(Scale)
    variables = jax.tree.map(jnp.asarray, model.init(KEY, X))
    assert (model.apply(variables, X) == 2 * X).all()


MAPPING = r"a mapping at bias, .*\['value'\].*a Param"
MISFITS = {
    "shape": (jnp.ones((1,)), flax.errors.ScopeParamShapeError, "bias"),
    "mapping": ({"value": jnp.ones(4)}, ValueError, MAPPING),
}


@pytest.mark.parametrize(("bias", "error", "phrase"), MISFITS.values(), ids=MISFITS)
def test_a_parameter_that_does_not_fit_is_an_error(bias, error, phrase):
    model = nnx.bridge.to_linen(nnx.Linear, 3, 4)
    with pytest.raises(error, match=phrase):
        model.apply({"params": {"kernel": jnp.ones((3, 4)), "bias": bias}}, X)


def test_keys_of_lists_may_be_strings():
    class Layers(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(3, 3, rngs=rngs) for _ in range(2)])

        def __call__(self, x):
            return self.layers[1](self.layers[0](x))

    model = nnx.bridge.to_linen(Layers)
    v = model.init(KEY, X)
    layers = {str(key): layer for key, layer in v["params"]["layers"].items()}
    out = model.apply({"params": {"layers": layers}}, X)
    assert (out == model.apply(v, X)).all()


def test_variables_of_numpy_can_be_changed():
    model = nnx.bridge.to_linen(Counter)
    v = jax.tree.map(np.asarray, model.init(KEY, X))
    _, updates = model.apply(v, X, mutable=["batch_stats"])
    assert updates["batch_stats"]["count"] == 1


def test_variables_that_hold_trees_come_back():
    class Tree(nnx.Module):
        def __init__(self, rngs):
            self.tree = nnx.Cache({"a": jnp.zeros(2), "b": {"c": jnp.ones(2)}})

        def __call__(self):
            tree = self.tree.get_value()
            self.tree.set_value({**tree, "a": tree["a"] + 1})
            return self.tree.get_value()["b"]["c"]

    model = nnx.bridge.to_linen(Tree)
    out, updates = model.apply(model.init(KEY), mutable=["cache"])
    assert (out == 1).all()
    assert (updates["cache"]["tree"]["a"] == 1).all()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Found unknown module paths")
def test_records_accumulate_when_given_back():
    class Sows(Bare):
        def __call__(self, x):
            self.sow(nnx.Intermediate, "h", x.sum())
            return x

    model = nnx.bridge.to_linen(Sows)
    _, updates = model.apply({}, X, mutable=["intermediates"])
    _, updates = model.apply(updates, X, mutable=["intermediates"])
    assert len(updates["intermediates"]["h"]) == 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Found unknown module paths")
def test_gradients_reach_perturbations():
    class Perturbed(Bare):
        def __call__(self, x):
            return (self.perturb("p", x) ** 2).sum()

    model = nnx.bridge.to_linen(Perturbed)
    p = {"p": jnp.zeros_like(X)}
    grads = jax.grad(lambda p: model.apply({"perturbations": p}, X))(p)
    np.testing.assert_allclose(grads["p"], 2 * X, rtol=1e-6)


def test_static_methods_are_called_as_they_are_and_nothing_but_methods():
    class Net(Bare):
        size = 4

        @staticmethod
        def double(x):
            return 2 * x

    model = nnx.bridge.to_linen(Net)
    assert model.apply({}, 3, nnx_method="double") == 6
    for method in (3, "size"):
        with pytest.raises(TypeError, match="must be a callable"):
            model.apply({}, nnx_method=method)


def test_classes_of_linen_modules_can_be_called_without_deriving():
    Linear = nnx.bridge.wrappers.to_linen_class(nnx.Linear, use_bias=False)
    model = Linear(in_features=3, out_features=4)
    v = model.init(KEY, X)
    assert jax.tree.map(np.shape, v) == {"params": {"kernel": (3, 4)}}
    assert Linear(args=(3, 4), name="named").name == "named"


def test_it_works_in_every_mode(graph):
    with nnx.set_graph_mode(graph):
        model = simple(nnx, 3, 4)
        v = model.init(KEYS, X)
        _, updates = model.apply(v, X, mutable=["Variable"])
    assert set(v) == {"params", "batch_stats", "Variable"}  # and no random streams
    assert updates["Variable"]["count"] == 1


def test_keys_are_only_drawn_from_bound_modules():
    with pytest.raises(ValueError, match="before it is bound"):
        nnx.bridge.wrappers.linen_rngs_dict(nn.Dense(3))


def test_tabulate_of_linen_shows_its_variables():
    table = simple(nnx, 3, 4).tabulate(KEYS, X, console_kwargs={"width": 120})
    assert f"Total Parameters: {3 * 4 + 4 + 4 * 4 + 1}" in table


def test_a_module_computes_in_linen_what_it_computes():
    model = nnx.bridge.to_linen(nnx.Linear, 3, 4)
    params = {"kernel": jnp.arange(12.0).reshape(3, 4), "bias": jnp.arange(4.0)}
    expected = np.asarray(X) @ np.arange(12.0).reshape(3, 4) + np.arange(4.0)
    np.testing.assert_allclose(model.apply({"params": params}, X), expected, rtol=1e-5)
