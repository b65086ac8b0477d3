"""Module: attributes of many, recording, traversal, views, Sequential (13)."""

import dataclasses
import operator

import jax
import jax.numpy as jnp
import optax
import pytest

import graftree as nnx
from tests.zoo import Box, Node, Scale

quiet = pytest.mark.filterwarnings("ignore::DeprecationWarning")
DEPRECATED = {"match": "capture"}
NOT_FOUND = "Could not find at least one instance of the following attributes"


class Leaf(nnx.Module):
    def __init__(self, rate=0.5):
        self.rate = rate
        self.deterministic = False
        self.use_running_average = False
        self.w = nnx.Param(jnp.ones(2))

    def set_view(self, deterministic: bool | None = None, rate=None):
        """Sets the mode.

        Args:
            deterministic: Whether it draws
                no random numbers.
            rate: The rate.
        """
        if deterministic is not None:
            self.deterministic = deterministic
        if rate is not None:
            self.rate = rate


def leaves():
    """A Module with some, in all that may hold them."""
    layers, plain = nnx.List([Leaf(), Leaf()]), nnx.data([{"a": Leaf()}])
    return Box(leaf=Leaf(), layers=layers, plain=plain, rngs=nnx.Rngs(0))


def shared_model():
    leaf = Leaf()
    return nnx.Dict(a=leaf, b=leaf)


# ------------------------------------------------------------------------------ sow


def test_sow_outside_a_capture_keeps_a_tuple_in_an_attribute():
    module = nnx.Module()
    with pytest.warns(DeprecationWarning, **DEPRECATED):
        assert module.sow(nnx.Intermediate, "x", 1) is True
        assert module.sow(nnx.Intermediate, "x", 2) is True
    assert type(module.x) is nnx.Intermediate and module.x.get_value() == (1, 2)


@quiet
def test_sow_takes_a_name_for_the_type_and_reduces_as_told():
    module = nnx.Module()
    module.sow("intermediates", "x", 1)
    module.sow("sown_just_now", "y", 1)
    assert type(module.x) is nnx.Intermediate
    assert type(module.y) is nnx.variable_type_from_name("sown_just_now")
    module, options = nnx.Module(), {"reduce_fn": operator.add, "init_fn": lambda: 1}
    for value in (3, 4):
        module.sow(nnx.Intermediate, "x", value, **options)
    assert module.x.get_value() == 8


@quiet
def test_sow_refuses_attributes_of_another_kind():
    module = Box(x=1, y=nnx.Perturbation((1,)))
    with pytest.raises(ValueError, match="to be a Variable, got"):
        module.sow(nnx.Intermediate, "x", 1)
    with pytest.raises(ValueError, match="to be of type"):
        module.sow(nnx.Intermediate, "y", 1)


@pytest.mark.parametrize("way", ["argument", "flag"])
def test_sow_can_be_switched_off_outside_a_capture(way):
    module = nnx.Module()
    noop = True if way == "argument" else None
    nnx.config.update("nnx_sow_capture_noop", way == "flag")
    try:
        assert module.sow(nnx.Intermediate, "x", 1, capture_noop=noop) is False
        assert module.perturb("p", 2.0, capture_noop=noop) == 2.0
    finally:
        nnx.config.update("nnx_sow_capture_noop", False)
    assert not hasattr(module, "x") and not hasattr(module, "p")


# -------------------------------------------------------------------------- perturb


def test_perturb_outside_a_capture_keeps_a_zero_in_an_attribute():
    module = nnx.Module()
    with pytest.warns(DeprecationWarning, **DEPRECATED):
        assert module.perturb("p", jnp.ones(2)).tolist() == [1.0, 1.0]
    assert type(module.p) is nnx.Perturbation and module.p[...].tolist() == [0.0, 0.0]
    module.p[...] += 3
    with pytest.warns(DeprecationWarning):
        assert module.perturb("p", jnp.ones(2)).tolist() == [4.0, 4.0]


@quiet
def test_perturb_checks_the_type_and_adds_leaf_by_leaf():
    module = Box(p=nnx.Param(1.0), q=nnx.Perturbation(jnp.array(2.0)))
    with pytest.raises(ValueError, match="to be of type"):
        module.perturb("p", 1.0)
    assert module.perturb("q", 1.0, variable_type=nnx.Intermediate) == 3.0
    out = module.perturb("tree", {"a": jnp.ones(2), "b": (jnp.zeros(1),)})
    assert out["a"].tolist() == [1.0, 1.0] and out["b"][0].tolist() == [0.0]


# ------------------------------------------------------------------- set_attributes


def test_attributes_are_set_on_all_modules_that_have_them():
    model = leaves()
    model.set_attributes(nnx.PathContains("layers"), rate=0.2)
    assert (model.layers[0].rate, model.leaf.rate) == (0.2, 0.5)
    assert model.set_attributes(rate=0.1, raise_if_not_found=True) is None
    assert model.layers[1].rate == model.plain[0]["a"].rate == model.leaf.rate == 0.1
    assert not hasattr(model, "rate")


def test_attributes_found_nowhere_are_listed_sorted():
    model = leaves()
    with pytest.raises(ValueError, match=NOT_FOUND + r": \['a', 'b'\]"):
        model.set_attributes(b=1, a=1, rate=0.1)
    model.set_attributes(b=1, raise_if_not_found=False)


def test_set_attributes_works_on_cycles_and_sharing_in_graph_mode():
    model = shared_model()
    model.me = model
    model.set_attributes(rate=0.1)
    assert model.a.rate == 0.1
    with pytest.raises(ValueError, match="found at paths"):
        shared_model().set_attributes(rate=0.1, graph=False)


def test_pytrees_that_are_no_modules_are_left_alone():
    model = nnx.Dict(a=Node(rate=1), b=Leaf())
    model.set_attributes(rate=2)
    assert (model.a.rate, model.b.rate) == (1, 2)


def test_train_and_eval_set_the_presets():
    model = leaves()
    assert model.eval(rate=0.0) is None
    leaf = model.layers[0]
    assert leaf.deterministic and leaf.use_running_average and leaf.rate == 0.0
    assert model.train() is None
    assert not leaf.deterministic and not leaf.use_running_average
    nnx.Module().eval(unknown=1)
    for mode in (model.train, model.eval):
        with pytest.raises(TypeError):
            mode(deterministic=True)


@pytest.mark.parametrize("updates", [True, False])
def test_mode_set_inside_jit_propagates_with_graph_updates_only(updates):
    leaf = Leaf()
    nnx.jit(lambda m: m.eval(), graph=True, graph_updates=updates)(leaf)
    assert leaf.deterministic is updates


# ------------------------------------------------------------------------- traversal


def test_iter_modules_yields_shared_modules_once_in_graph_mode():
    model = shared_model()
    assert [path for path, _ in nnx.iter_modules(model)] == [("a",), ()]
    with pytest.raises(ValueError, match="found at paths"):
        list(nnx.iter_modules(model, graph=False))


def test_iter_modules_takes_any_node_and_yields_nothing_for_others():
    found = [path for path, _ in nnx.iter_modules([Leaf(), {"k": Leaf()}])]
    assert found == [(0,), (1, "k")] and list(nnx.iter_modules(3)) == []


@pytest.mark.parametrize("name", ["iter_modules", "iter_children"])
def test_methods_equal_the_functions_and_warn(name):
    model = leaves()
    generator = getattr(model, name)()
    with pytest.warns(DeprecationWarning):
        found = list(generator)
    assert found == list(getattr(nnx, name)(model))


def test_first_from_gives_the_first_that_is_not_none():
    assert nnx.module.first_from(None, 0, 1, error_msg="x") == 0
    with pytest.raises(ValueError, match="^x$"):
        nnx.module.first_from(None, None, error_msg="x")


# ------------------------------------------------------------------------------ views


def test_view_is_a_new_node_that_shares_variables():
    model = leaves()
    view = nnx.view(model, deterministic=True)
    assert view is not model and type(view) is Box
    assert view.leaf.deterministic and not model.leaf.deterministic
    assert view.leaf.w is model.leaf.w and view.layers is not model.layers
    assert view.plain is not model.plain and view.plain[0]["a"].deterministic
    view.leaf.w[...] += 1
    assert model.leaf.w[...].tolist() == [2.0, 2.0]


def test_copies_share_static_values(graph):
    """Also lists and dicts, whose order may be part of what a model computes."""
    steps = {"scale": [1, (2, {"rate": 3})], "add": 4}
    model = Box(steps=steps, options=nnx.data({"b": [], "a": 1}))
    view = nnx.view(model, graph=graph)
    changed = nnx.with_attributes(model, options=2, graph=graph)
    assert view.steps is changed.steps is steps and [*steps] == ["scale", "add"]
    assert view.options is not model.options
    assert view.options["b"] is not model.options["b"]


def test_view_keeps_sharing_in_graph_mode():
    view = nnx.view(shared_model(), deterministic=True)
    assert view.a is view.b
    with pytest.raises(ValueError, match="found at paths"):
        nnx.view(shared_model(), deterministic=True, graph=False)


def test_view_restricts_to_a_filter_and_leaves_none_alone():
    view = nnx.view(leaves(), only=nnx.PathContains("layers"), rate=0.1)
    assert (view.layers[0].rate, view.leaf.rate) == (0.1, 0.5)
    assert nnx.view(leaves(), rate=None).leaf.rate == 0.5


def test_view_refuses_what_nobody_takes():
    message = r"Unused keys found in nnx\.view: \['a', 'b'\]"
    with pytest.raises(ValueError, match=message):
        nnx.view(leaves(), b=1, a=2, rate=0.1)
    assert nnx.view(leaves(), a=1, raise_if_not_found=False).leaf.rate == 0.5


def test_view_passes_all_keywords_to_a_set_view_that_takes_them_all():
    class Greedy(nnx.Pytree):
        def set_view(self, x, **kwargs):
            self.seen = (x, *sorted(kwargs.items()))

    assert nnx.view(Greedy(), x=1, z=3, y=2).seen == (1, ("y", 2), ("z", 3))


def test_set_view_is_called_bottom_up():
    class Outer(Box):
        def set_view(self, deterministic=None):
            self.seen = self.inner.deterministic

    assert nnx.view(Outer(inner=Leaf()), deterministic=True).seen is True


def test_set_view_may_create_variables_on_the_view():
    class Cached(nnx.Module):
        def set_view(self, size=None):
            self.cache = nnx.Cache(jnp.zeros(size))

    model = Cached()
    assert nnx.view(model, size=3).cache.shape == (3,) and not hasattr(model, "cache")


def test_view_refuses_cycles():
    model = leaves()
    model.me = model
    with pytest.raises(ValueError, match="Found cycle"):
        nnx.view(model, deterministic=True)


def test_view_takes_lists_and_dicts_and_works_inside_jit():
    views = nnx.view([Leaf(), {"a": Leaf()}], deterministic=True)
    assert views[0].deterministic and views[1]["a"].deterministic
    model = leaves()
    jax.jit(lambda: nnx.view(model, deterministic=True).leaf.w[...])()
    assert not model.leaf.deterministic


def test_view_draws_no_keys_and_view_info_is_not_confused_by_rngs():
    model = leaves()
    nnx.view(model, deterministic=True)
    assert model.rngs.default.count[...] == 0
    assert "Rngs" not in nnx.view_info(model)


def test_with_attributes_sets_on_a_copy():
    model = leaves()
    new = nnx.with_attributes(model, rate=0.1, only=nnx.PathContains("layers"))
    assert (new.layers[0].rate, new.leaf.rate, model.layers[0].rate) == (0.1, 0.5, 0.5)
    assert new.leaf.w is model.leaf.w
    with pytest.raises(ValueError, match=NOT_FOUND):
        nnx.with_attributes(model, unknown=1)
    assert nnx.with_attributes(model, unknown=1, raise_if_not_found=False) is not model


def test_view_info_lists_classes_parameters_and_their_docs():
    assert nnx.view_info(leaves()) == (
        "Leaf:\n"
        "  deterministic: bool | None = None\n"
        "    Whether it draws\n"
        "    no random numbers.\n"
        "  rate: <class 'inspect._empty'> = None\n"
        "    The rate."
    )


def test_view_info_of_methods_with_less_documentation():
    class Bare(nnx.Module):
        def set_view(self, x, *args, y: int = 1, **kwargs): ...

    class Partly(nnx.Module):
        def set_view(self, x: int):
            """Says nothing about x."""

    assert "set_view(self, x, *args, y: int = 1, **kwargs)" in nnx.view_info(Bare())
    assert "x: <class 'int'>" in nnx.view_info(Partly())
    assert nnx.view_info(nnx.Module()) == ""


# ------------------------------------------------------------------------ Sequential


def test_layers_are_a_list_and_the_module_iterates_over_them():
    model = nnx.Sequential(jnp.sin, jnp.cos)
    assert isinstance(model.layers, nnx.List) and list(model) == [jnp.sin, jnp.cos]
    assert not hasattr(model, "__len__") and not hasattr(model, "__getitem__")


def test_without_layers_the_input_comes_back():
    model = nnx.Sequential()
    assert model(1) == 1 and model(1, 2) == (1, 2) and model() is None
    assert model(a=1) == {"a": 1}


def test_tuples_become_arguments_and_dicts_keywords():
    pair, mapping = lambda x: (x, 2), lambda a, b: {"c": a, "d": b}
    assert nnx.Sequential(pair, mapping, lambda c, d: c - d)(5) == 3
    # As the keywords of the call are those of the first layer.
    assert nnx.Sequential(lambda x: x + 1, lambda y: y * 2)(x=1) == 4


def test_keywords_reach_the_layers_that_take_them():
    takes = lambda x, *, scale: x * scale  # noqa: E731
    takes_all = lambda x, **kwargs: (x, sorted(kwargs))  # noqa: E731
    model = nnx.Sequential(takes, lambda x: x + 1, takes_all)
    assert model(3, scale=2, unknown=1) == (7, ["scale", "unknown"])
    without_signature = nnx.Sequential(max, lambda x, scale: x * scale)
    assert without_signature(1, 2, scale=3) == 6


def test_layers_that_can_not_be_called_so_are_named():
    twice = r"(?s)Got multiple values for arguments.*Sequential\[1\]"
    with pytest.raises(TypeError, match=twice):
        nnx.Sequential(lambda x: {"a": x}, lambda a: a)(1, a=2)
    with pytest.raises(TypeError, match=r"Sequence\[1\]"):
        nnx.Sequential(jnp.sin, 3)(1.0)


def test_has_keyword_arg():
    has = nnx.helpers.has_keyword_arg
    assert has(lambda a: 1, "a") and has(lambda *, a: 1, "a")
    assert not has(lambda **a: 1, "a") and not has(lambda a, /: 1, "a")


# ------------------------------------------------------------------------ TrainState


@pytest.fixture
def train_state():
    graphdef, params = nnx.split(nnx.Dict(w=nnx.Param(jnp.array(2.0))))
    return nnx.TrainState.create(graphdef, params=params, tx=optax.sgd(0.1))


def test_train_state_is_a_frozen_pytree(train_state):
    assert train_state.step == 0 and isinstance(train_state.step, jax.Array)
    with pytest.raises(dataclasses.FrozenInstanceError):
        train_state.step = 1
    mapped = jax.tree.map(lambda x: x, train_state)
    assert type(mapped) is nnx.TrainState and mapped.tx is train_state.tx


def test_gradients_are_applied_by_the_optimizer(train_state):
    new = train_state.apply_gradients(jax.tree.map(jnp.ones_like, train_state.params))
    assert new.step == 1 and abs(new.params["w"][...] - 1.9) < 1e-6
    assert train_state.params["w"][...] == 2.0


def test_fields_can_be_added_and_replaced(train_state):
    class WithCounts(nnx.TrainState):
        counts: nnx.State

    counts = nnx.State({"c": nnx.Variable(jnp.array(0))})
    given = {"params": train_state.params, "tx": train_state.tx, "counts": counts}
    state = WithCounts.create(train_state.graphdef, **given)
    assert state.counts is counts and state.replace(step=5).step == 5


def test_apply_merges_the_states():
    graphdef, params = nnx.split(Scale(2.0))
    state = nnx.TrainState.create(graphdef, params=params, tx=optax.sgd(0.1))
    out, (graphdef, new) = state.apply("params")(3.0)
    assert out == 6.0 and state.apply(new)(2.0)[0] == 4.0
    with pytest.raises(TypeError, match="to be a State"):
        state.apply("step")
