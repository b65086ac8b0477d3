"""`find_nans`: what counts as a finding, where it is, what stays; in all layers."""

import dataclasses
import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from graftree.debugging import nan_search
from graftree.transforms import recordings
from tests import tables, zoo

find_nans = nnx.debugging.find_nans


class Scale(zoo.Scale):
    """Has a second method."""

    def log(self, x):
        return jnp.log(self.w * x)


# ------------------------------------------------------------------- what is a finding


def test_finite_program_has_no_finding():
    report = find_nans(Scale(2.0))(jnp.ones(2))
    assert not report and report.first is None and report.first_nan is None
    assert str(report) == "All results are finite."


def test_infinity_and_the_nan_made_of_it_are_both_told():
    def f(x):
        with jax.named_scope("net/head"):
            return jnp.exp(x) - jnp.exp(x)

    report = find_nans(f)(jnp.array([[0.0, 91.3, 0.0]]))
    place = "in the output of `{}`\n  at      net.head\n".format
    assert f"First non-finite value: inf {place('exp')}" in str(report)
    assert f"First NaN: {place('sub')}" in str(report)
    assert report.first.example == "exp(91.3) = inf"
    assert report.first.inputs == ("float32[1,3] in [0, 91.3], all finite",)
    assert report.first.output == "float32[1,3]: 1 +inf of 3, first inf at [0, 1]"
    assert report.first_nan.cause is report.first


def softmax(x, mask):
    return jax.nn.softmax(jnp.where(mask, x, -jnp.inf))


def test_mask_of_infinities_is_no_finding():
    assert not find_nans(softmax)(jnp.ones(2), jnp.array([True, False]))
    grad = jax.grad(lambda x, mask: (softmax(x, mask) ** 2).sum())
    assert not find_nans(grad)(jnp.ones(2), jnp.array([True, False]))


def test_mask_of_infinities_is_told_as_the_cause_of_nan():
    report = find_nans(softmax)(jnp.ones(2), jnp.array([False, False]))
    assert report.first is report.first_nan and report.first.operation == "sub"
    assert report.first.cause.is_constant
    assert "inf is  a constant of the program, test_nans.py:" in str(report)


def test_infinity_of_the_program_in_a_result_is_told_but_is_no_finding():
    report = find_nans(lambda x: jnp.where(x > 1, x, -jnp.inf))(jnp.ones(2))
    assert not report
    assert str(report).startswith(
        "No result contains NaN or a newly created infinity. One contains:\n"
        "  inf, a constant of the program, test_nans.py:"
    )


def test_infinity_that_arises_beside_a_mask_is_a_finding():
    x = jnp.array([-1.0, 99.0])
    report = find_nans(lambda x: jnp.exp(jnp.where(x > 0, x, -jnp.inf)))(x)
    assert report.first.example == "exp(99) = inf"


def test_nan_that_is_left_out_is_no_finding_but_is_told():
    report = find_nans(lambda x: jnp.where(x > 0, jnp.log(x), 0.0))(-jnp.ones(2))
    assert not report
    assert "NaN, which reached no result, in the output of `log`" in str(report)


def test_branch_left_out_in_the_forward_pass_is_found_in_the_backward_pass():
    def loss(x):
        with jax.named_scope("net/norm"):
            return jnp.where(x > 0, jnp.sqrt(x), 0.0).sum()

    assert not find_nans(loss)(jnp.array([0.0, 1.0]))
    report = find_nans(jax.grad(loss))(jnp.array([0.0, 1.0]))
    assert report.first.example == "div(0.5, 0) = inf"
    assert report.first_nan.example == "mul(0, inf) = nan"
    assert report.path == "net.norm"
    text = "First NaN: in the output of `mul`\n  at      net.norm (backward)"
    assert text in str(report)


def test_constants_that_are_nan_are_findings():
    nan = jnp.array(jnp.nan)
    report = find_nans(lambda x: x * nan)(jnp.ones(2))
    assert report.first.is_constant
    assert str(report).startswith("First non-finite value: NaN, a constant of the")


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.complex64])
def test_every_dtype_is_looked_at(dtype):
    x = jnp.full(2, 3e4 if dtype == jnp.float16 else 3e38, dtype)
    assert find_nans(lambda x: x * x * x)(x)


# -------------------------------------------------------------------------- arguments


def test_argument_that_is_not_finite_is_named():
    def f(net, batch, *, rate):
        return net.layers[1](batch["image"]) * rate

    net = nnx.Sequential(Scale(1.0), Scale(1.0))
    image = jnp.array([1.0, jnp.nan])
    report = find_nans(f)(net, {"image": image}, rate=jnp.ones(()))
    assert report.path == "batch['image']"
    assert "in the argument `batch['image']`" in str(report)
    net.layers[1].w[...] = jnp.inf
    report = find_nans(nnx.jit(f))(net, {"image": image}, rate=jnp.ones(()))
    assert report.path == "net.layers[1].w"
    assert "1 other argument is not finite either" in str(report)
    report = find_nans(f)(net, {"image": jnp.ones(2)}, rate=jnp.array(jnp.nan))
    assert report.first_nan.argument == "rate"


def test_object_of_a_method_goes_by_its_class():
    assert find_nans(Scale(0.0).log)(jnp.ones(2)).path == "Scale.log"
    assert find_nans(Scale(jnp.nan).log)(jnp.ones(2)).path == "Scale.w"


def test_argument_that_reaches_no_result_is_no_finding():
    report = find_nans(lambda x, padding: x)(jnp.ones(2), jnp.array([jnp.nan]))
    assert not report
    assert "which reached no result, in the argument `padding`" in str(report)


# -------------------------------------------------------------------------- transforms


def grow(x):
    with jax.named_scope("cell"):
        return jnp.exp(x)


def test_iterations_and_branches_are_told():
    def scan(x):
        return jax.lax.scan(lambda c, _: (grow(c), None), x, None, length=5)[0]

    def repeat(x):
        return jax.lax.while_loop(
            lambda c: c[0] < 5, lambda c: (c[0] + 1, grow(c[1])), (0, x)
        )[1]

    def choose(x):
        return jax.lax.cond(x < 99, lambda x: x, grow, x)

    for f, x, step in [
        (scan, 1.0, "iteration 3 of 5 of scan"),  # e, e^e, e^e^e, inf
        (repeat, 1.0, "iteration 3 of while"),
        (choose, 100.0, "branch 0 of cond"),
    ]:
        report = find_nans(f)(jnp.array(x))
        assert (report.path, report.first.within) == ("cell", (step,))


def test_infinity_of_the_program_may_pass_through_loops():
    def scan(x):
        return jax.lax.scan(lambda c, x: (jnp.maximum(c, x), c), -jnp.inf, x)

    for x in (jnp.zeros(0), jnp.ones(2)):
        report = find_nans(scan)(x)
        assert not report and "inf, a constant of the program" in str(report)


def test_backward_pass_of_a_scan_is_gone_into():
    def loss(x):
        def body(c, _):
            with jax.named_scope("cell"):
                return jnp.sqrt(c), None

        return jax.lax.scan(body, x, None, length=2)[0]

    report = find_nans(jax.jit(jax.grad(loss)))(jnp.array(0.0))
    assert report.first.operation == "div" and report.path == "cell"
    assert report.first.within == ("iteration 0 of 2 of scan",)


def test_rematerialized_part_has_its_path_once():
    @jax.checkpoint
    def block(x):
        with jax.named_scope("blocks[1]/norm"):
            return jnp.sqrt(jnp.abs(x)) * x

    def loss(x):
        with jax.named_scope("net"):
            return block(jnp.sin(x)).sum()

    report = find_nans(jax.jit(jax.grad(loss)))(jnp.array([0.0, 1.0]))
    assert report.path == "net.blocks[1].norm"


def test_rules_of_custom_derivatives_are_gone_into():
    @jax.custom_vjp
    def f(x):
        return x

    def bwd(_, g):
        with jax.named_scope("rule"):
            return (g / 0.0,)

    f.defvjp(lambda x: (x, None), bwd)
    assert not find_nans(f)(jnp.ones(()))
    report = find_nans(jax.grad(f))(jnp.ones(()))
    assert report.path == "rule"
    assert str(report).startswith("First non-finite value: inf in the output of `div`")


def test_what_cannot_be_gone_into_is_one_operation():
    def f(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(lambda x: np.full_like(x, np.nan), shape, x)

    report = find_nans(f)(jnp.ones(2))
    assert report.first.operation == "pure_callback"
    assert "inside  a pure_callback: not searched" in str(report)


# ------------------------------------------------------------------ ways to call, state


def test_functions_methods_and_modules_are_taken():
    model, x = Scale(0.0), jnp.ones(2)
    for report in [
        find_nans(model.log)(x),
        find_nans(Scale.log)(model, x=x),
        find_nans(nnx.jit(Scale.log))(model, x),
        find_nans(functools.partial(Scale.log, model))(x),
        find_nans(nnx.jit(lambda m, name, x: getattr(m, name)(x), static_argnums=1))(
            model, "log", x
        ),
        find_nans(jax.jit(lambda m, x: m.log(x)))(model, x),
    ]:
        assert report.first.operation == "log"


class Stateful(nnx.Module):
    """Has a count, a random stream and a ref."""

    def __init__(self):
        self.count = nnx.BatchStat(jnp.array(0.0))
        self.rngs = nnx.Rngs(0)
        self.ref = nnx.Variable(jnp.ones(2), ref=True)

    def __call__(self, x):
        self.count[...] += 1
        self.rngs()
        self.ref[...] += x
        self.calls = nnx.Variable(x)
        return jnp.log(self.ref * self.count)


def test_search_writes_to_nothing():
    model = Stateful()
    before = jax.tree.leaves(nnx.state(model))
    assert find_nans(nnx.jit(Stateful.__call__))(model, -jnp.ones(2))
    assert find_nans(model)(-jnp.ones(2)).first.example == "log(0) = -inf"
    after = jax.tree.leaves(nnx.state(model))
    assert [*map(id, before)] == [*map(id, after)]
    assert not model.ref.sum() - 2 and not hasattr(model, "calls")


def test_values_in_refs_are_followed():
    def f(ref, x):
        ref[...] = jnp.log(x)
        return ref[...] * 0.0

    report = find_nans(f)(jax.new_ref(jnp.ones(2)), jnp.zeros(2))
    assert (report.first.operation, report.first_nan.operation) == ("log", "mul")

    def scanned(ref, x):
        def body(c, x):
            ref[...] = jnp.log(x)
            return c + 1, None

        return jax.lax.scan(body, 0, x)[0]

    report = find_nans(scanned)(jax.new_ref(jnp.ones(())), jnp.array([1.0, 0.0]))
    assert report.first.operation == "log"
    assert report.first.within == ("iteration 1 of 2 of scan",)


def test_search_inside_a_trace_is_refused():
    with pytest.raises(ValueError, match="runs a function on numbers.*\n  x: "):
        jax.jit(lambda x: find_nans(jnp.log)(x))(1.0)


def test_debug_nans_of_jax_does_not_stop_the_search():
    with jax.debug_nans(True):
        assert find_nans(jnp.log)(jnp.array(-1.0)).first.operation == "log"


# --------------------------------------------------------------------------- internals
# Of names that JAX has given in other versions, of arrays that are on no device here,
# and of outputs that `find_nans` doesn't give, nothing else can tell.


def test_arrays_of_other_devices_are_looked_at_there(monkeypatch):
    monkeypatch.setattr(nan_search, "_is_on_host", lambda x: False)
    nan, inf = nan_search.NAN, nan_search.INF
    known = {0.0: [], jnp.nan: [nan], -jnp.inf: [inf]}
    for number, kinds in known.items():
        for dtype in (jnp.float32, jnp.bfloat16, jnp.complex64):
            assert nan_search.kinds_in(jnp.full(2, number, dtype)) == kinds
    assert nan_search.kinds_in(jnp.array([jnp.nan, jnp.inf])) == [nan, inf]


@tables.cases(
    "names, path, backward",
    ("net/blocks[3] attn", "net.blocks[3].attn", False),
    ("jvp() net attn", "net.attn", False),
    ("transpose() jvp() net vmap() attn/query", "net.attn.query", True),
    # As JAX names the backward pass of what is rematerialized.
    (
        "transpose() jvp() net jvp() net rematted_computation blocks[0]",
        "net.blocks[0]",
        True,
    ),
    ("transpose() jvp() net blocks[0] attn", "net.blocks[0].attn", True),
    ("net attn BTNH,BSNH->BNTS", "net.attn", False),
    ("my_scope net", "my_scope.net", False),
    ("", "", False),
)
def test_names_around_an_operation_are_a_path(names, path, backward):
    scopes = [(n.removesuffix("()"), n.endswith("()")) for n in names.split()]
    place = recordings.NameStack().within(scopes)
    assert place.path("self") == path and place.is_backward == backward


# ------------------------------------------------------------------------------- layers


HUGE, BIG, SMALL = 3e38, 1e30, 1e-30


class Net(zoo.Scale):
    """A layer with a parameter before it, whose gradient passes through the layer."""

    def __init__(self, layer):
        super().__init__(1.0)
        self.layer = layer

    def __call__(self, x):
        return self.layer(self.w * x if jnp.issubdtype(x.dtype, jnp.floating) else x)


@dataclasses.dataclass
class Row:
    """A layer, what makes its output bad, and what makes only its gradient bad.

    Attributes:
        layer: Makes the layer, given ``rngs``.
        x: Its input, forward and backward.
        plants: Changes the layer, forward and backward.
        weight: What its output is multiplied by: the cotangent.
        inner: Where in the layer that is.
    """

    layer: Callable[..., Any]
    x: tuple[Any, Any]
    plants: tuple[Callable[[Any], Any], Callable[[Any], Any]]
    weight: float = BIG
    inner: str = ""


def overflow(layer):
    """Products of its parameters and 2 are infinities of both signs: NaN in a sum."""
    random = np.random.default_rng(0)
    for _, param in nnx.to_flat_state(nnx.state(layer, nnx.Param)):
        param.set_value(HUGE * random.choice([-1.0, 1.0], param.shape).astype("f"))


def filled(*path, value):
    """Fills one parameter: a large one overflows by its product with a cotangent."""

    def plant(layer):
        for key in path:
            layer = layer[key] if isinstance(key, int) else getattr(layer, key)
        layer.set_value(jnp.full(layer.shape, value, layer.dtype))

    return plant


def epsilon(value, *zeros):
    """Without epsilon the inverse of a length 0 is infinite; its cube is sooner."""

    def plant(layer):
        layer.epsilon = value
        if zeros:
            filled(*zeros, value=0.0)(layer)

    return plant


def untouched(layer):
    """The input is enough."""


def product(layer, shape, *path, inner=""):
    x = jnp.full(shape, 2.0), jnp.full(shape, SMALL)
    plants = overflow, filled(*(path or ["kernel"]), value=1e20)
    return Row(layer, x, plants, inner=inner)


KERNEL = "layer_instance", "kernel"
IN_CELL = "cell", "ig", "kernel"
linear = partial(nnx.Linear, 4, 4)


def lstm(rngs):
    return nnx.RNN(nnx.LSTMCell(4, 4, rngs=rngs))


ROWS = {
    "Linear": product(linear, (2, 4)),
    "Conv": product(partial(nnx.Conv, 2, 3, (3,)), (1, 5, 2)),
    # A token that isn't in the table; a token twice, whose gradients are added.
    "Embed": Row(
        partial(nnx.Embed, 5, 4),
        (jnp.array([1, 7]), jnp.array([1, 1])),
        (untouched, filled("embedding", value=SMALL)),
        weight=HUGE,
    ),
    # A constant input has no variance, and a kernel of zeros no length.
    "LayerNorm": Row(
        partial(nnx.LayerNorm, 4),
        (jnp.zeros((2, 4)), jnp.zeros((2, 4))),
        (epsilon(0.0), epsilon(1e-35)),
        weight=1.0,
    ),
    "WeightNorm": Row(
        lambda rngs: nnx.WeightNorm(linear(rngs=rngs), rngs=rngs),
        (jnp.ones((2, 4)), jnp.ones((2, 4))),
        (epsilon(0.0, *KERNEL), epsilon(1e-35, *KERNEL)),
        weight=1.0,
    ),
    "MultiHeadAttention": product(
        partial(nnx.MultiHeadAttention, 2, 4, decode=False),
        (1, 3, 4),
        "value",
        "kernel",
    ),
    "RNN": product(lstm, (1, 3, 4), *IN_CELL, inner=".cell"),
    "Sequential": product(
        lambda rngs: nnx.Sequential(jnp.abs, linear(rngs=rngs)),
        *((2, 4), "layers", 1, "kernel"),
        inner=".layers[1]",
    ),
    "Dropout": Row(
        partial(nnx.Dropout, 0.5),
        (jnp.full(8, HUGE), jnp.full(8, SMALL)),
        (untouched, untouched),
        weight=HUGE,
    ),
    "AvgPool": Row(
        lambda rngs: nnx.AvgPool((2,)),
        (jnp.full((1, 4, 1), HUGE), None),
        (untouched, untouched),
    ),
    "MaxPool": Row(
        lambda rngs: nnx.MaxPool((3,)),
        (None, jnp.array([0.0, 0.0, SMALL, 0.0, 0.0]).reshape(1, 5, 1)),
        (untouched, untouched),
        weight=HUGE,
    ),
}


def loss(net, x, weight):
    return (net(x) * weight).sum()


CASES = [
    pytest.param(
        *(name, backward),
        id=f"{name}-{'backward' if backward else 'forward'}",
        marks=() if name == "RNN" else pytest.mark.long,
    )
    for name, row in ROWS.items()
    for backward in (False, True)
    if row.x[backward] is not None
]


@pytest.mark.parametrize(("name", "backward"), CASES)
def test_layer_is_named_that_makes_a_value_which_is_not_finite(name, backward):
    row = ROWS[name]
    layer = row.layer(rngs=nnx.Rngs(0))
    row.plants[backward](layer)
    net, x = Net(layer), row.x[backward]
    if backward:
        assert not nnx.debugging.find_nans(loss)(net, x, row.weight)
        report = nnx.debugging.find_nans(nnx.jit(nnx.grad(loss)))(net, x, row.weight)
    else:
        report = nnx.debugging.find_nans(nnx.jit(loss))(net, x, 1.0)
    expected = f"net.layer{row.inner}"
    assert report and (report.path + ".").startswith(expected + "."), str(report)
