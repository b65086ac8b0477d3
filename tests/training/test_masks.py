"""Masks and labels in Optax transformations, in whatever form they are written."""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import graftree as nnx
from tests.comparisons import raises

KERNELS = np.random.default_rng(0).normal(size=(3, 2, 2)).astype(np.float32)


class Dense(nnx.Module):
    """A layer with known values."""

    def __init__(self, number):
        self.kernel = nnx.Param(jnp.asarray(KERNELS[number]), tag=number)
        self.bias = nnx.Param(jnp.asarray(KERNELS[number][0]))


class Net(nnx.Module):
    """Layers in a List, one more beside them, and a Variable that is not trained."""

    def __init__(self):
        self.layers = nnx.List([Dense(0), Dense(1)])
        self.out = Dense(2)
        self.stats = nnx.BatchStat(jnp.zeros(2))


def params_of(model):
    return nnx.state(model, nnx.Param)


def in_layers(path):
    return path[0] == "layers"


def is_kernel(path):
    return "kernel" in path


RULES = in_layers, is_kernel


def keys(jax_path):
    """The path of a Variable's value."""
    return [getattr(x, "key", getattr(x, "name", None)) for x in jax_path]


def as_dicts(rule, key=lambda key: key):
    leaf = lambda *path: rule(path)  # noqa: E731
    layer = lambda *path: {name: leaf(*path, name) for name in ("kernel", "bias")}  # noqa: E731
    layers = {key(index): layer("layers", index) for index in range(2)}
    return {"layers": layers, "out": layer("out")}


def as_lists(rule):
    nested = as_dicts(rule)
    return {**nested, "layers": [*nested["layers"].values()]}


def as_state(rule, params):
    return nnx.map_state(lambda path, _: rule(path), params)


def mapped(rule, tree):
    return jax.tree.map_with_path(lambda path, _: rule(keys(path)), tree)


# For each form, a tree of a rule, or a function that Optax calls with the parameters.
WHOLE = {
    "State": lambda rule: as_state(rule, params_of(Net())),
    "State of Variables": lambda rule: mapped(rule, params_of(Net())),
    "model": lambda rule: mapped(rule, Net()),
    "dicts": as_dicts,
    "pure dict": lambda rule: nnx.to_pure_dict(WHOLE["State"](rule)),
    "strings": lambda rule: as_dicts(rule, str),
    "lists": as_lists,
    "function": lambda rule: functools.partial(as_state, rule),
    "function of trees": lambda rule: functools.partial(mapped, rule),
    "function to dicts": lambda rule: lambda params: as_dicts(rule),
}
PREFIXES = {
    "prefix State": lambda yes, no: nnx.State({"layers": yes, "out": no}),
    "prefix dict": lambda yes, no: {"layers": yes, "out": no},
    "prefix of strings": lambda yes, no: {"layers": {"0": yes, "1": yes}, "out": no},
    "prefix of lists": lambda yes, no: {"layers": [yes, yes], "out": no},
    "function to a prefix": lambda yes, no: lambda _: {"layers": yes, "out": no},
}


def forms(yes, no):
    """All forms of the masks of two rules: the form, the rule, and the mask."""
    for rule in RULES:
        for form, make in WHOLE.items():
            yield form, rule, make(functools.partial(choose, rule, yes, no))
    for form, make in PREFIXES.items():
        yield form, in_layers, make(yes, no)


def choose(rule, yes, no, path):
    return yes if rule(path) else no


def by_label(make, *inner):
    return lambda labels: make(dict(zip("ab", inner, strict=True)), labels)


adamw = functools.partial(optax.adamw, 0.1, weight_decay=0.1)
SGD, ADAM, ZERO = optax.sgd(0.1, momentum=0.9), optax.adam(0.1), optax.set_to_zero()
MASKED = {
    "adamw": lambda mask: adamw(mask=mask),
    "lars": lambda mask: optax.lars(
        0.1, weight_decay=0.1, weight_decay_mask=mask, trust_ratio_mask=mask
    ),
    "adafactor": lambda mask: optax.adafactor(
        0.1, min_dim_size_to_factor=2, weight_decay_rate=0.1, weight_decay_mask=mask
    ),
    "add_decayed_weights": lambda mask: optax.chain(
        optax.add_decayed_weights(0.1, mask), optax.sgd(0.1)
    ),
    "masked": lambda mask: optax.masked(ADAM, mask),
    "masked clip": lambda mask: optax.chain(
        optax.masked(optax.clip_by_block_rms(0.1), mask), SGD
    ),
    "freeze": lambda mask: optax.chain(ADAM, optax.transforms.freeze(mask)),
    "selective_transform": lambda mask: optax.transforms.selective_transform(
        ADAM, freeze_mask=mask
    ),
    "inject_hyperparams": lambda mask: optax.inject_hyperparams(
        optax.adamw, static_args="mask"
    )(0.1, weight_decay=0.1, mask=mask),
    "MultiSteps": lambda mask: optax.MultiSteps(adamw(mask=mask), 2),
    "apply_if_finite": lambda mask: optax.apply_if_finite(adamw(mask=mask), 2),
    "named_chain": lambda mask: optax.named_chain(("a", adamw(mask=mask))),
    "schedule_free": lambda mask: optax.contrib.schedule_free(
        optax.chain(optax.add_decayed_weights(0.1, mask), optax.adam(0.1, b1=0.0)), 0.1
    ),
    "muon": lambda mask: optax.contrib.muon(
        0.1, weight_decay=0.1, weight_decay_mask=mask
    ),
}
LABELLED = {
    "partition": by_label(optax.partition, SGD, ADAM),
    "multi_transform": by_label(optax.multi_transform, ADAM, adamw()),
    "set_to_zero by labels": by_label(optax.partition, ADAM, ZERO),
    "partition in MultiSteps": lambda labels: optax.MultiSteps(
        by_label(optax.partition, SGD, ZERO)(labels), 2
    ),
    "inject_hyperparams of partition": lambda labels: optax.inject_hyperparams(
        lambda rate: optax.partition({"a": optax.adam(rate), "b": ZERO}, labels)
    )(0.1),
}
ALL = {name: (make, (True, False)) for name, make in MASKED.items()}
ALL |= {name: (make, ("a", "b")) for name, make in LABELLED.items()}


# Its mask is not called if it is a function.
TREES_ONLY = ["selective_transform"]


def cases_of(name):
    """The forms, rules and transformations of one name."""
    make, values = ALL[name]
    for form, rule, tree in forms(*values):
        if not (form.startswith("function") and name in TREES_ONLY):
            yield form, rule, make(tree)


def by_turns(name, cases):
    """Of the forms each fifth, for each transformation others; in the long run all."""
    turn = [*ALL].index(name)
    is_whole = os.environ.get("TEST_ALL")
    return [x for i, x in enumerate(cases) if is_whole or i % 5 == turn % 5]


def slope(w):
    return jnp.sin(3 * w) + w


def train(tx, update=nnx.Optimizer.update):
    """The parameters after three steps, and the optimizer."""
    model = Net()
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    for _ in range(3):
        update(optimizer, model, jax.tree.map(slope, params_of(model)))
    return nnx.to_pure_dict(params_of(model)), optimizer


@functools.cache
def expected(name, rule):
    """What Optax computes for dicts of arrays."""
    make, values = ALL[name]
    tx = make(as_dicts(functools.partial(choose, rule, *values)))
    params = nnx.to_pure_dict(params_of(Net()))
    state = tx.init(params)
    for _ in range(3):
        updates, state = tx.update(jax.tree.map(slope, params), state, params)
        params = optax.apply_updates(params, updates)
    return params


def assert_same(actual, desired, case):
    assert jax.tree.structure(actual) == jax.tree.structure(desired)
    for one, other in zip(*map(jax.tree.leaves, (actual, desired)), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6, err_msg=case)


@pytest.fixture(autouse=True)
def ranks():
    """Some of Optax needs the promotion of ranks."""
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.filterwarnings("ignore:.*multi_transform")
@pytest.mark.parametrize("name", ALL)
def test_all_forms_of_masks_and_labels_train_as_optax_does(name):
    states = {}
    for form, rule, tx in by_turns(name, cases_of(name)):
        params, optimizer = train(tx)
        assert_same(params, expected(name, rule), form)
        # The state of an optimizer does not depend on the form.
        state = nnx.to_flat_state(nnx.state(optimizer))
        kinds = {path: type(leaf) for path, leaf in state if jax.tree.leaves(leaf)}
        assert kinds == states.setdefault(rule, kinds), form


# ------------------------------------------------- trees of other shapes, and the rest


def mask_of_kernels(tree):
    return mapped(is_kernel, tree)


def pair():
    """Two models as one."""
    return Dense(0), Dense(1)


CONTAINERS = {
    "prefix": (True, False),
    "dicts": ({"kernel": True, "bias": True}, {"kernel": False, "bias": False}),
    "models": (jax.tree.map(lambda _: True, Dense(0)), False),
    "State": nnx.State({0: True, 1: False}),
}


@pytest.mark.parametrize("form", CONTAINERS)
def test_masks_of_a_tuple_of_models(form):
    models = pair()
    tx = optax.chain(optax.masked(optax.set_to_zero(), CONTAINERS[form]), SGD)
    optimizer = nnx.Optimizer(models, tx, wrt=nnx.Param)
    optimizer.update(models, jax.tree.map(jnp.ones_like, nnx.state(models)))
    np.testing.assert_array_equal(models[0].kernel[...], KERNELS[0])
    np.testing.assert_allclose(models[1].kernel[...], KERNELS[1] - 0.1, rtol=1e-6)
    assert isinstance(optimizer.opt_state[1][0].trace, nnx.State)


LOOKAHEAD_MASKS = {
    "none": lambda model: None,
    "State": lambda model: as_state(is_kernel, nnx.state(model)),
    "State of Variables": lambda model: mask_of_kernels(nnx.state(model)),
    "dicts": lambda model: {"kernel": True, "bias": False},
    "function": lambda model: functools.partial(as_state, is_kernel),
}


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("form", LOOKAHEAD_MASKS)
def test_lookahead_takes_gradients_of_the_fast_model(form, is_compiled):
    fast = Dense(0)
    both = optax.LookaheadParams(fast=fast, slow=nnx.clone(fast))
    tx = optax.lookahead(adamw(mask=LOOKAHEAD_MASKS[form](fast)), 2, 0.5)
    optimizer = nnx.Optimizer(both, tx, wrt=nnx.Param)
    mask = None if form == "none" else {"kernel": True, "bias": False}
    tx = optax.lookahead(adamw(mask=mask), 2, 0.5)
    params = optax.LookaheadParams.init_synced(nnx.to_pure_dict(nnx.state(Dense(0))))
    state = tx.init(params)

    def step(optimizer, both):
        optimizer.update(both, jax.tree.map(slope, params_of(both.fast)))

    step = nnx.jit(step) if is_compiled else step
    for _ in range(3):
        step(optimizer, both)
        updates, state = tx.update(jax.tree.map(slope, params.fast), state, params)
        params = optax.apply_updates(params, updates)
    for model, values in zip(both, params, strict=True):
        assert_same(nnx.to_pure_dict(nnx.state(model)), values, form)


def test_lookahead_of_one_model_says_what_it_needs():
    model = Dense(0)
    optimizer = nnx.Optimizer(model, optax.lookahead(SGD, 2, 0.5), wrt=nnx.Param)
    with raises(AttributeError, "'fast'", "optax.LookaheadParams(fast=model, slow="):
        optimizer.update(model, jax.tree.map(jnp.ones_like, nnx.state(model)))


def test_schedule_free_gives_the_parameters_for_evaluation():
    tx = optax.contrib.schedule_free_adamw(0.1, weight_decay=0.1)
    params, optimizer = train(tx)
    plain = nnx.to_pure_dict(params_of(Net()))
    state = tx.init(plain)
    for _ in range(3):
        updates, state = tx.update(jax.tree.map(slope, plain), state, plain)
        plain = optax.apply_updates(plain, updates)
    desired = optax.contrib.schedule_free_eval_params(state, plain)
    own = nnx.from_flat_state(nnx.to_flat_state(nnx.State(params)))
    for opt_state in (optimizer.opt_state, nnx.as_pure(optimizer.opt_state)):
        actual = optax.contrib.schedule_free_eval_params(opt_state, own)
        assert_same(nnx.to_pure_dict(actual), desired, "")


def test_refs_are_masked_by_a_tree_of_their_state():
    with nnx.var_defaults(ref=True):
        model = Dense(0)
        tx = optax.chain(
            optax.masked(optax.set_to_zero(), mask_of_kernels(nnx.state(model))),
            optax.masked(optax.trace(0.9), mask_of_kernels(nnx.state(model))),
            SGD,
        )
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    trace = optimizer.opt_state[1].inner_state.trace
    # What a mask leaves out is no array, so it has no ref.
    assert (trace["kernel"].ref, trace["bias"].ref) == (True, False)
    grads = {
        name: nnx.Param(jnp.ones_like(getattr(model, name)[...]))
        for name in ("kernel", "bias")
    }
    jax.jit(lambda: optimizer.update(model, nnx.State(grads)))()
    np.testing.assert_array_equal(model.kernel[...], KERNELS[0])
    np.testing.assert_allclose(model.bias[...], KERNELS[0][0] - 0.1, rtol=1e-6)


MISFITS = {
    "missing": ({"layers": True}, ["missing: out/bias", "missing: out/kernel"]),
    "unexpected": ({"layers": True, "out": True, "head": True}, ["unexpected: head"]),
    "deeper": (
        {"layers": True, "out": {"kernel": {"a": True}, "bias": True}},
        ["missing: out/kernel", "unexpected: out/kernel/a"],
    ),
    "of all Variables": (
        jax.tree.map(lambda _: True, nnx.state(Net())),
        ["unexpected: stats"],
    ),
    "other containers": ({"layers": (True, True), "out": True}, ["containers"]),
    "of a function": (lambda params: {"layers": True}, ["missing: out/bias"]),
}


@pytest.mark.parametrize("case", MISFITS)
def test_trees_that_do_not_fit_are_refused_when_the_optimizer_is_made(case):
    tree, named = MISFITS[case]
    way_out = "nested dicts, or in a State"
    with raises(ValueError, "a mask or labels", "wrt=Param", *named, way_out):
        nnx.Optimizer(Net(), adamw(mask=tree), wrt=nnx.Param)


def test_two_forms_in_one_transformation_are_refused_when_the_optimizer_is_made():
    state = nnx.State({"layers": True, "out": False})
    dicts = {"layers": True, "out": False}
    tx = optax.chain(optax.masked(SGD, state), optax.masked(SGD, dicts))
    with raises(ValueError, "a mask or labels", "All trees in one `tx`", "same form"):
        nnx.Optimizer(Net(), tx, wrt=nnx.Param)


def test_what_a_transformation_raises_itself_passes_through():
    def init(params):
        raise ZeroDivisionError("mine")

    tx = optax.GradientTransformation(init, optax.identity().update)
    with pytest.raises(ZeroDivisionError, match="^mine$"):
        nnx.Optimizer(Net(), tx, wrt=nnx.Param)


def test_the_form_belongs_to_the_structure_of_an_optimizer():
    def make(mask):
        return nnx.Optimizer(model, adamw(mask=mask), wrt=nnx.Param)

    model = Dense(0)
    optimizer = make({"kernel": True, "bias": False})
    for other in (nnx.clone(optimizer), nnx.merge(*nnx.split(optimizer))):
        other.update(model, jax.tree.map(jnp.ones_like, nnx.state(model)))
    # A checkpoint made with a function restores into one made with dicts.
    usual = make(functools.partial(as_state, is_kernel))
    nnx.update(optimizer, nnx.state(usual))
    assert optimizer.step[...] == 0
