"""Which dtypes the operations of a program have."""

import jax
import jax.numpy as jnp
import pytest

import graftree as nnx

F32, BF16 = "float32", "bfloat16"


class Net(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(3)])
        self.count = nnx.Variable(jnp.array(0))

    def __call__(self, x):
        self.count[...] += 1
        for layer in self.layers:
            x = layer(x)
        return x


X = jnp.ones((2, 4))


def step(net, x):
    return nnx.grad(lambda net: net(x).astype(jnp.float32).mean())(net)


@pytest.fixture
def net():
    return Net(nnx.Rngs(0))


def dots(report, direction):
    """Path and number of the products of a direction."""
    found = [x for x in report.operations if x.name == "dot"]
    return {x.path: x.count for x in found if x.direction == direction}


def test_dots_are_listed_by_module_forward_and_backward(net):
    report = nnx.precision.report(step, net, X)
    paths = [f"net.layers[{i}]" for i in range(3)]
    assert dots(report, "forward") == dict.fromkeys(paths, 1)
    # By the weights, and but for the first layer by the inputs.
    assert dots(report, "backward") == {paths[0]: 1, paths[1]: 2, paths[2]: 2}
    assert report.counts() == {(F32, F32, F32): 8}


def test_a_policy_shows_before_and_after(net):
    before = nnx.precision.report(net, X).counts("dot")
    nnx.precision.set_policy(net, "params=f32, compute=bf16, output=f32")
    after = nnx.precision.report(net, X).counts("dot")
    assert before == {(F32, F32, F32): 3} and after == {(BF16, BF16, BF16): 3}
    assert "Net.layers[0-2]  forward  dot        bf16 bf16 -> bf16  3" in str(
        nnx.precision.report(net, X)
    )


def test_nothing_is_computed_or_changed(net):
    graphdef = nnx.graphdef(net)

    def fail(x):
        raise AssertionError

    def run(net, x, word):
        assert word == "a constant"
        jax.debug.callback(fail, x)
        return net(x)

    nnx.precision.report(run, net, X, "a constant")
    assert net.count[...] == 0 and nnx.graphdef(net) == graphdef


@pytest.mark.parametrize("jit", [nnx.jit, jax.jit])
def test_compiled_functions_are_gone_into(net, jit):
    assert nnx.precision.report(jit(step), net, X).counts() == {(F32, F32, F32): 8}


def test_steps_of_scan_are_counted(net):
    def run(net, xs):
        return nnx.scan(lambda net, x: net.layers[0](x), in_axes=(None, 0), out_axes=0)(
            net, xs
        )

    report = nnx.precision.report(run, net, jnp.ones((5, 2, 4)))
    assert dots(report, "forward") == {"net.layers[0]": 5}


def test_recomputed_parts_are_told_apart(net):
    def run(net, x):
        @nnx.remat
        def part(net, x):
            return jnp.sin(net.layers[1](jnp.sin(net.layers[0](x))))

        return nnx.grad(lambda net: part(net, x).mean())(net)

    report = nnx.precision.report(run, net, X)
    assert dots(report, "recomputed") == {"net.layers[0]": 1, "net.layers[1]": 1}
    assert dots(report, "backward") == {"net.layers[0]": 1, "net.layers[1]": 2}


def test_rules_of_derivatives_are_gone_into():
    @jax.custom_vjp
    def product(x, w):
        return x @ w

    product.defvjp(
        lambda x, w: (product(x, w), (x, w)), lambda xw, g: (g @ xw[1].T, xw[0].T @ g)
    )

    class Own(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones((4, 4)))

        def __call__(self, x):
            return product(x, self.w[...])

    report = nnx.precision.report(step, Own(), X)
    assert dots(report, "forward") == {"net": 1}
    assert dots(report, "backward") == {"net": 2}


def test_convolutions_and_reductions_of_norms_are_listed():
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(
        nnx.Conv(2, 2, (3,), rngs=rngs), nnx.LayerNorm(2, rngs=rngs), nnx.softmax
    )
    nnx.precision.set_policy(model, "params=f32, compute=bf16")
    report = nnx.precision.report(model, jnp.ones((1, 5, 2)))
    assert report.counts("conv") == {(BF16, BF16, BF16): 1}
    sums = [x for x in report.operations if x.name == "sum"]
    assert sums[0].path == "Sequential.layers[1]" and sums[0].operands == (F32,)


def test_abstract_arguments_and_methods_are_taken(net):
    abstract = nnx.eval_shape(lambda: Net(nnx.Rngs(0)))
    x = jax.ShapeDtypeStruct((2, 4), jnp.bfloat16)
    assert nnx.precision.report(abstract, x).counts() == {(F32, F32, F32): 3}
    assert nnx.precision.report(net.layers[0].__call__, X).counts() != {}


def test_a_program_without_such_operations_says_so():
    assert "no dots" in str(nnx.precision.report(jnp.sin, 1.0))
