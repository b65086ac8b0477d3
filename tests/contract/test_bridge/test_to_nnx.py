"""Linen Modules as Modules, and the reverse: what is ours beyond the peer."""

import copy

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import comparisons, tables
from tests.interop.bridge.modules import KEY, X
from tests.interop.bridge.programs_to_linen import KEYS, simple
from tests.interop.bridge.programs_to_nnx import Block, TwoMethods, block

pytestmark = pytest.mark.usefixtures("implicit_ranks")


class Named(nn.Module):
    name_of: str

    @nn.compact
    def __call__(self, x):
        return x + self.param(self.name_of, nn.initializers.ones, (3,))


class Recording(nn.Module):
    """Sows into a collection under the name of a parameter."""

    @nn.compact
    def __call__(self, x):
        self.sow("intermediates", "a", x)
        return x * self.param("a", nn.initializers.ones, (3,))


class WithStatic(nn.Module):
    width: int = 5

    def __call__(self, x):
        return x

    @staticmethod
    def double(x):
        return 2 * x

    @classmethod
    def title(cls):
        return cls.__name__


def test_updates_go_into_the_same_variables():
    model = block(nnx)
    before = model.BatchNorm_0["mean"]
    graphdef = nnx.graphdef(model)
    model(X, train=True, mutable=["batch_stats", "counts"])
    assert model.BatchNorm_0["mean"] is before
    assert (before[...] != 0).any()
    assert nnx.graphdef(model) == graphdef


def test_training_does_not_compile_again():
    model = nnx.bridge.lazy_init(block(nnx), X)
    traces = []

    @nnx.jit
    def step(model, x):
        traces.append(1)
        return model(x, train=True, mutable=["batch_stats", "counts"])

    for _ in range(4):
        step(model, X)
    assert len(traces) == 1


@pytest.mark.parametrize("name", ["module", "rngs", "to_nnx__rngs", "_pytree__state"])
def test_names_that_it_needs_itself_are_refused(name):
    model = nnx.bridge.ToNNX(Named(name), nnx.Rngs(0))
    with comparisons.raises(ValueError, f"'{name}'", "needs for itself", "Rename"):
        model.lazy_init(X)
    assert not nnx.bridge.variables.nnx_attrs_to_linen_vars(nnx.state(model, nnx.Param))


@tables.cases("name", "sow", "lazy_init", "train", "0", "with space", "__x")
def test_other_names_are_fine(name):
    model = nnx.bridge.ToNNX(Named(name), nnx.Rngs(0))
    nnx.bridge.lazy_init(model, X)
    assert (model(X) == X + 1).all()


def test_a_record_does_not_replace_a_parameter_of_its_name():
    model = nnx.bridge.ToNNX(Recording(), nnx.Rngs(0)).lazy_init(X)
    with pytest.raises(ValueError, match="Found duplicate variable path"):
        model(X, mutable=["intermediates"])
    assert (model.a[...] == 1).all()


def test_static_and_class_methods_are_called_as_they_are():
    model = nnx.bridge.ToNNX(WithStatic(), nnx.Rngs(0))
    assert (model.double(2), model.title()) == (4, "WithStatic")


@pytest.mark.parametrize("bad", [3, lambda x: x, TwoMethods().shifted, nnx.relu])
def test_only_modules_and_their_methods_are_initialized(bad):
    with pytest.raises(ValueError, match="needs to be a method of an NNX Module"):
        nnx.bridge.lazy_init(bad, X)


def test_methods_of_linen_can_initialize():
    model = nnx.bridge.ToNNX(TwoMethods(), nnx.Rngs(0))
    nnx.bridge.lazy_init(model.shifted, X)
    assert model.dense["kernel"].shape == (3, 4)


def test_a_failed_initialization_leaves_no_flag():
    class Fails(nnx.Module):
        def __init__(self):
            self.inner = nnx.bridge.ToNNX(nn.Dense(2), nnx.Rngs(0))

        def __call__(self, x):
            assert self._pytree__state.initializing
            assert self.inner._pytree__state.initializing
            raise RuntimeError("in the call")

    model = Fails()
    with pytest.raises(RuntimeError, match="in the call"):
        nnx.bridge.lazy_init(model, X)
    assert not model._pytree__state.initializing
    assert not model.inner._pytree__state.initializing


def test_rngs_are_forked():
    rngs = nnx.Rngs(0)
    model = nnx.bridge.ToNNX(nn.Dense(2), rngs)
    model.lazy_init(X)
    assert rngs.default.count[...] == 1
    assert model.to_nnx__rngs.default.count[...] == 1


@pytest.mark.parametrize("rngs", [None, {"params": jax.random.key(0)}])
def test_other_rngs_are_kept_as_they_are(rngs):
    assert nnx.bridge.ToNNX(nn.Dense(2), rngs).to_nnx__rngs == rngs


def test_keys_by_name_are_passed_on():
    model = nnx.bridge.ToNNX(nn.Dense(2), {"params": jax.random.key(0)}).lazy_init(X)
    same = nnx.bridge.ToNNX(nn.Dense(2), jax.random.key(0))
    same.lazy_init(X, rngs={"params": jax.random.key(0)})
    assert (model.kernel[...] == same.kernel[...]).all()


@tables.cases("copy_of", copy.deepcopy, nnx.clone, ids=["deepcopy", "clone"])
def test_copies_are_independent(copy_of):
    model = block(nnx)
    copied = copy_of(model)
    copied(X, train=True, mutable=["batch_stats"])
    assert (model.BatchNorm_0["mean"][...] == 0).all()
    assert (copied.BatchNorm_0["mean"][...] != 0).any()


def test_writes_in_a_closure_of_a_trace_are_refused():
    model = block(nnx)
    with pytest.raises(nnx.errors.TraceContextError):
        jax.jit(lambda x: model(x, train=True, mutable=["batch_stats"]))(X)
    assert not isinstance(model.BatchNorm_0["mean"][...], jax.core.Tracer)


def test_unknown_attributes_are_named():
    told = "'ToNNX' object has no attribute 'nothing'"
    with pytest.raises(AttributeError, match=told):
        nnx.bridge.ToNNX(nn.Dense(2), nnx.Rngs(0)).nothing


def test_values_that_are_trees_keep_their_structure():
    class Tree(nn.Module):
        @nn.compact
        def __call__(self, x):
            pair = self.variable("cache", "pair", lambda: (jnp.zeros(2), jnp.ones(2)))
            pair.value = (pair.value[0] + 1, pair.value[1])
            return pair.value[0]

    model = nnx.bridge.ToNNX(Tree(), nnx.Rngs(0)).lazy_init(X)
    assert (model(X, mutable=["cache"]) == 2).all()
    assert len(model.pair.get_value()) == 2


# ------------------------------------------ what goes over the bridge computes the same


def test_a_linen_module_computes_what_it_computes_in_linen():
    model = nnx.bridge.ToNNX(Block(), nnx.Rngs(0)).lazy_init(X)
    attributes = {k: v for k, v in vars(model).items() if k[0].isupper() or k == "n"}
    variables = nnx.bridge.variables.nnx_attrs_to_linen_vars(attributes)
    assert sorted(variables) == ["batch_stats", "counts", "params"]
    np.testing.assert_array_equal(model(X), Block().apply(variables, X))
    options = {"train": True, "mutable": ["batch_stats"]}
    key = jax.random.key(3)
    out = model(X, rngs=nnx.Rngs(dropout=key), **options)
    dropout = {"dropout": nnx.Rngs(dropout=key).dropout()}
    expected, updates = Block().apply(variables, X, rngs=dropout, **options)
    np.testing.assert_array_equal(out, expected)
    for name, value in updates["batch_stats"]["BatchNorm_0"].items():
        np.testing.assert_array_equal(model.BatchNorm_0[name][...], value)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_wrappers_of_wrappers_keep_the_parameters(depth):
    def deeper(make_linen):
        class Inner(nnx.Module):
            def __init__(self, rngs):
                self.inner = nnx.bridge.ToNNX(make_linen(), rngs).lazy_init(X)

            def __call__(self, x):
                return self.inner(x)

        return lambda: nnx.bridge.to_linen(Inner)

    def make():
        return nn.Dense(2)

    for _ in range(depth):
        make = deeper(make)
    variables = make().init(jax.random.key(0), X)
    params = variables["params"]
    for _ in range(depth):
        (params,) = params.values()
    expected = X @ params["kernel"] + params["bias"]
    np.testing.assert_allclose(make().apply(variables, X), expected, rtol=1e-5)


def test_the_modules_of_the_bridge_are_those_of_the_contract():
    for path in "wrappers", "variables", "module", "interop", "initializers":
        assert hasattr(nnx.bridge, path)
    assert nnx.wrappers is nnx.bridge.wrappers
    assert isinstance(nnx.bridge.to_linen(nnx.Linear, 2, 3), nn.Module)
    assert isinstance(nnx.bridge.ToNNX(nn.Dense(2)), nnx.Module)
    assert issubclass(nnx.bridge.Module, nnx.Module)


# ------------------------------------------------------------------------------ ToLinen


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
