"""Policies, layers made in their context, the report of dtypes, scales of losses."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import graftree as nnx
from tests import comparisons, meshes, tables, threads, zoo
from tests.precision.test_models import HALF, POLICY, Model, everything, output_dtype


def made(make, policy=POLICY, **options):
    with nnx.precision.default(policy, **options):
        return make()


@pytest.mark.parametrize("policy", [POLICY, HALF])
@tables.cases(
    "make",
    lambda: Model(nnx.Rngs(0)),
    lambda: nnx.Conv(1, 2, (3,), rngs=nnx.Rngs(0)),
    lambda: nnx.LoRALinear(2, 3, lora_rank=1, rngs=nnx.Rngs(0)),
    lambda: nnx.RNN(nnx.SimpleCell(2, 3, rngs=nnx.Rngs(0)), rngs=False),
    lambda: nnx.RNN(nnx.LSTMCell(2, 3, rngs=nnx.Rngs(0)), rngs=False),
    lambda: nnx.Sequential(nnx.BatchNorm(2, rngs=nnx.Rngs(0)), nnx.relu),
    lambda: nnx.WeightNorm(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1)),
    ids=["model", "conv", "lora", "simple", "lstm", "norm", "weight norm"],
)
def test_a_model_is_as_if_the_policy_were_set_afterwards(make, policy):
    model, expected = made(make, policy), make()
    nnx.precision.set_policy(expected, policy)
    graphdef, state = everything(model)
    assert graphdef == everything(expected)[0]
    same = jax.tree.map(
        lambda a, b: a.dtype == b.dtype and np.array_equal(a, b),
        state,
        everything(expected)[1],
    )
    assert all(jax.tree.leaves(same))


def test_nothing_is_left_after_the_context_even_after_an_exception():
    with pytest.raises(KeyError), nnx.precision.default(HALF):
        raise KeyError
    assert nnx.Linear(2, 2, rngs=nnx.Rngs(0)).dtype is None
    with nnx.precision.default(POLICY):
        made(lambda: None, HALF)
        assert nnx.Linear(2, 2, rngs=nnx.Rngs(0)).kernel[...].dtype == jnp.float32


def test_arguments_of_the_caller_win():
    def make():
        return (
            nnx.Linear(2, 2, dtype=jnp.float16, rngs=nnx.Rngs(0)),
            nnx.Linear(2, 2, param_dtype=jnp.float32, rngs=nnx.Rngs(0)),
            nnx.Linear(2, 2, dtype=None, rngs=nnx.Rngs(0)),
            nnx.LayerNorm(2, dtype=jnp.float16, rngs=nnx.Rngs(0)),
            nnx.SimpleCell(2, 2, dtype=jnp.float32, rngs=nnx.Rngs(0)),
        )

    half, stored, unsaid, norm, cell = made(make, HALF)
    assert half.dtype is jnp.float16 and half.kernel[...].dtype == jnp.bfloat16
    assert stored.kernel[...].dtype == jnp.float32 and stored.dtype is jnp.bfloat16
    assert unsaid.dtype is jnp.bfloat16
    assert norm(jnp.ones((1, 2))).dtype == jnp.float16
    assert cell.dtype is cell.dense_i.dtype is jnp.float32
    assert cell.dense_i.kernel[...].dtype == jnp.bfloat16


def test_arguments_hold_for_the_layers_inside_a_layer():
    def make(**dtypes):
        return nnx.MultiHeadAttention(2, 4, rngs=nnx.Rngs(0), **dtypes)

    attention = made(lambda: make(dtype=jnp.float16), HALF)
    assert attention.query.dtype is attention.out.dtype is jnp.float16
    assert attention.query.kernel[...].dtype == jnp.bfloat16
    attention = made(lambda: make(param_dtype=jnp.float32), HALF)
    assert attention.out.kernel[...].dtype == jnp.float32
    options = {"lora_rank": 1, "lora_dtype": jnp.float16}
    lora = made(lambda: nnx.LoRALinear(2, 2, **options, rngs=nnx.Rngs(0)))
    assert lora.lora.dtype is jnp.float16 and lora.dtype is jnp.bfloat16


def test_what_a_class_chooses_for_its_base_wins():
    class Wide(nnx.Linear):
        def __init__(self, rngs):
            super().__init__(2, 2, dtype=jnp.float16, rngs=rngs)

    class Plain(nnx.Embed):
        def __init__(self, rngs):
            super().__init__(2, 2, rngs=rngs)

    assert made(lambda: Wide(nnx.Rngs(0))).dtype is jnp.float16
    assert made(lambda: Plain(nnx.Rngs(0))).dtype is jnp.bfloat16


def test_random_numbers_are_those_of_float32():
    expected = nnx.Linear(2, 3, rngs=nnx.Rngs(0)).kernel[...].astype(jnp.bfloat16)
    kernel = made(lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(0)), HALF).kernel[...]
    np.testing.assert_array_equal(kernel, expected)


def test_only_what_is_called_for_casts_its_output():
    def make():
        layers = [nnx.Linear(2, 2, rngs=nnx.Rngs(i)) for i in range(2)]
        return layers, nnx.Sequential(*layers)

    layers, model = made(make)
    x = jnp.ones((1, 2))
    assert model(x).dtype == jnp.float32 and layers[0](x).dtype == jnp.bfloat16


def test_what_was_made_elsewhere_stays_as_it_is():
    outside = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    model = made(lambda: nnx.Sequential(outside, nnx.Linear(2, 2, rngs=nnx.Rngs(1))))
    assert outside.dtype is None and model.layers[1].dtype is jnp.bfloat16


def test_models_made_by_transforms_get_it_too(mode):
    @nnx.jit(**mode)
    def make():
        return Model(nnx.Rngs(0))

    plain = [make(), make()]
    model = made(make)
    assert model.head.dtype is jnp.bfloat16 and output_dtype(model) == jnp.float32
    assert [x.head.dtype for x in (*plain, make())] == [None] * 3
    assert made(make, "params=f32, compute=f16").head.dtype is jnp.float16
    abstract = made(lambda: nnx.eval_shape(lambda: Model(nnx.Rngs(0))), HALF)
    assert abstract.head.kernel.get_raw_value().dtype == jnp.bfloat16


def test_layers_made_under_vmap_in_a_constructor_get_it_too():
    def layer(rngs):
        return nnx.Linear(2, 2, rngs=rngs)

    class Layers(nnx.Module):
        def __init__(self):
            self.layers = nnx.vmap(layer)(nnx.Rngs(0).split(3))
            self.stack = nnx.Stack(layer, 3, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.stack(x)

    model = made(Layers)
    assert model.layers.dtype is jnp.bfloat16
    x = jnp.ones((1, 2), jnp.bfloat16)
    assert model(x).dtype == jnp.float32
    made_half = made(Layers, HALF)
    assert made_half.layers.kernel[...].dtype == jnp.bfloat16
    assert made_half(x).dtype == jnp.bfloat16


def test_exceptions_select_in_each_model():
    exceptions = {nnx.Embed: "compute=f32", "head": "compute=f16"}
    model = made(lambda: Model(nnx.Rngs(0)), exceptions=exceptions)
    assert model.embed.dtype is jnp.float32 and model.head.dtype is jnp.float16
    with pytest.raises(ValueError, match="exception Conv matches no module"):
        made(lambda: Model(nnx.Rngs(0)), exceptions={nnx.Conv: "compute=f32"})
    with pytest.raises(ValueError, match="lacks params"):
        made(lambda: None, "compute=f16")


def test_unknown_layers_are_warned_of_when_they_are_made():
    with pytest.warns(nnx.errors.UnknownLayerWarning, match="containers") as caught:
        made(lambda: nnx.List([nnx.Param(jnp.ones(2))]))
    assert caught[0].filename == __file__


def test_other_threads_and_other_objects_do_not_notice():
    found = []

    def make():
        found.append(nnx.Linear(2, 2, rngs=nnx.Rngs(0)).dtype)

    with nnx.precision.default(POLICY):
        threads.run_in_threads(make)
        assert nnx.Dict(a=1)["a"] == 1
    assert found == [None]


def test_a_constructor_that_fails_leaves_the_next_one_alone():
    with nnx.precision.default(POLICY):
        with pytest.raises(TypeError, match="in_features"):
            nnx.Linear()
        model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    assert model(jnp.ones((1, 2))).dtype == jnp.float32


# --------------------------------------------------------------------- what a policy is


Policy = nnx.precision.Policy


@tables.cases(
    "text",
    "params=f32, compute=bf16, output=f32",
    "output = f32,compute=bf16 , params=f32",
)
def test_a_text_names_parts_in_any_order(text):
    policy = Policy.parse(text)
    assert policy == Policy(jnp.float32, jnp.bfloat16, "f32")
    assert hash(policy) == hash(Policy("f32", "bf16", "f32"))
    assert str(policy) == "params=float32, compute=bfloat16, output=float32"
    assert Policy.parse(str(policy)) == policy


@tables.cases(
    "text, told",
    ("", "not of the form"),
    ("f32", "'f32' is not of the form"),
    ("params=f32, ", "'' is not of the form"),
    ("compute=", "'compute=' is not of the form"),
    ("param=f32", "no part 'param' (did you mean 'params'?)"),
    ("params=f32, params=bf16", "params is given twice"),
    ("compute=bf61", "not a floating dtype of a policy (did you mean 'bf16'?)"),
    ("compute=int8", "'int8' is not a floating dtype"),
    ("compute=f64", "64-bit types switched off"),
)
def test_a_text_that_cannot_be_read_says_why(text, told):
    with comparisons.raises(ValueError, told):
        Policy.parse(text)


def test_a_policy_that_is_no_text_is_refused():
    with pytest.raises(TypeError, match="got int"):
        Policy.parse(32)
    with pytest.raises(ValueError, match="not a floating dtype"):
        Policy(params=jnp.int32)


def test_float64_is_taken_where_jax_has_it(float64):
    assert Policy(compute="f64").compute == jnp.float64


@tables.cases(
    "text, told",
    ("compute=f32", "lacks params"),
    ("output=f32", "lacks params and compute"),
)
def test_the_policy_of_a_model_needs_params_and_compute(text, told):
    with pytest.raises(ValueError, match=told):
        nnx.precision.set_policy(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), text)


def test_a_policy_without_an_output_has_none():
    layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    applied = nnx.precision.set_policy(layer, "params=f32, compute=f16")
    assert applied.policy.output is None


# ------------------------------------------------------------------------------ reports


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


def test_equal_layers_in_a_compiled_function_have_their_own_paths():
    def run(layers, x):
        apply = nnx.jit(lambda layer, x: layer(x))
        for layer in layers:
            x = apply(layer, x)
        return x

    layers = nnx.List([nnx.Linear(4, 4, rngs=nnx.Rngs(i)) for i in range(2)])
    report = nnx.precision.report(run, layers, X)
    assert dots(report, "forward") == {"layers[0]": 1, "layers[1]": 1}


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


# ------------------------------------------------------------------ the scale of a loss


INF = jnp.inf


def loss_of(net, x):
    return jnp.mean(net(x) ** 2)


def parts(**options):
    net = zoo.Block()
    optimizer = nnx.Optimizer(net, optax.adam(0.1), wrt=nnx.Param)
    return net, optimizer, nnx.precision.DynamicScale(**options)


def train_step(net, optimizer, scaler, x):
    loss, grads = scaler.value_and_grad(loss_of)(net, x)
    scaler.update(optimizer, net, grads)
    return loss


def contents(*objects):
    """All values but for those of random streams."""
    state = nnx.state(objects, nnx.Not(nnx.RngState))
    return [np.asarray(x) for x in jax.tree.leaves(nnx.as_pure(state))]


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


GOOD = jnp.array([[1.0, 2.0], [0.5, -1.0], [3.0, 0.1]])
BAD = GOOD.at[0, 0].set(INF)


def test_a_step_that_is_not_finite_changes_nothing_but_the_scale():
    net, optimizer, scaler = parts()
    step = nnx.jit(train_step)
    step(net, optimizer, scaler, GOOD)
    before, count = contents(net, optimizer), net.dropout.rngs.count[...]
    step(net, optimizer, scaler, BAD)
    assert same(contents(net, optimizer), before)
    assert not scaler.is_finite[...] and scaler.scale[...] == 2.0**15
    assert net.dropout.rngs.count[...] == count + 1  # no key is used twice
    step(net, optimizer, scaler, GOOD)
    assert scaler.is_finite[...] and not same(contents(net, optimizer), before)
    assert optimizer.step[...] == 2


def test_gradients_below_float16_survive_and_are_float32():
    weight = nnx.Dict(w=nnx.Param(jnp.array(1.0, jnp.float16)))

    def loss(weight):
        return weight.w[...].astype(jnp.float32) * 1e-9

    assert nnx.grad(loss)(weight).w[...] == 0
    scaler = nnx.precision.DynamicScale(scale=2.0**14)
    value, grads = scaler.value_and_grad(loss)(weight)
    np.testing.assert_allclose(value, 1e-9, rtol=1e-6)
    assert grads.w[...].dtype == jnp.float32
    np.testing.assert_allclose(grads.w[...], 1e-9, rtol=0.01)


def test_it_works_in_all_modes_and_with_auxiliary_outputs(mode):
    def loss(model, x):
        return jnp.mean(model(x) ** 2), {"x": x}

    scaler, model = nnx.precision.DynamicScale(), nnx.Linear(2, 2, rngs=nnx.Rngs(0))

    @nnx.jit(**mode)
    def run(scaler, model, x):
        return scaler.value_and_grad(loss, has_aux=True, **mode)(model, x)

    (value, aux), grads = run(scaler, model, GOOD)
    expected, aux_too = loss(model, GOOD)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_array_equal(aux["x"], aux_too["x"])
    expected = nnx.grad(lambda m: loss(m, GOOD)[0], **mode)(model)
    np.testing.assert_allclose(grads.kernel[...], expected.kernel[...], rtol=1e-5)
    assert scaler.finite_steps[...] == 1


def test_a_model_may_have_arrays_in_a_tuple():
    net, optimizer, scaler = parts()
    net.factors = nnx.data((jnp.ones(2), np.ones(2)))
    before = contents(net)
    train_step(net, optimizer, scaler, BAD)
    assert same(before, contents(net))


def test_plain_jax_jit_takes_it():
    scaler, model = nnx.precision.DynamicScale(), nnx.Linear(2, 2, rngs=nnx.Rngs(0))

    @jax.jit
    def run(scaler, model, x):
        scaler.value_and_grad(loss_of)(model, x)
        return scaler

    scaler = run(scaler, model, GOOD)
    assert run(scaler, model, BAD).scale[...] == 2.0**15


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("is_shared", [True, False])
def test_gradients_in_shard_map_are_means_over_the_devices(is_shared, check_vma):
    def step(weight, x):
        scaler = nnx.precision.DynamicScale(scale=4.0)
        _, grad = scaler.value_and_grad(
            lambda weight, x: jnp.mean(weight * x), axis_name=("a", "b")
        )(weight, x)
        return grad

    mesh, rows = meshes.mesh_of(a=2, b=4), jax.P(("a", "b"))
    weight, x = jnp.full(() if is_shared else 8, 2.0), jnp.arange(16.0)
    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(jax.P() if is_shared else rows, rows),
        out_specs=jax.P(),
        check_vma=check_vma,
    )
    np.testing.assert_allclose(mapped(weight, x), 7.5)


def test_mapped_gradients_are_averaged_and_devices_agree():
    scaler, model = nnx.precision.DynamicScale(), nnx.Linear(2, 2, rngs=nnx.Rngs(0))

    def run(scaler, model, x):
        _, grads = scaler.value_and_grad(loss_of, axis_name="i")(model, x)
        return grads.kernel[...], scaler.is_finite[...], scaler.scale[...]

    def mapped(xs):
        copied = nnx.clone(scaler)
        return jax.vmap(lambda x: run(nnx.clone(copied), model, x), axis_name="i")(xs)

    xs = jnp.stack([GOOD, 2 * GOOD])
    kernel, is_finite, _ = mapped(xs)
    kernels = [nnx.grad(loss_of)(model, x).kernel[...] for x in xs]
    expected = jnp.mean(jnp.stack(kernels), axis=0)
    np.testing.assert_allclose(kernel[0], expected, rtol=1e-5)
    assert is_finite.all()
    _, is_finite, scale = mapped(jnp.stack([GOOD, BAD]))
    assert not is_finite.any() and (scale == 2.0**15).all()


def test_bare_arrays_of_a_model_are_brought_back_too():
    class Counted(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones(2))
            self.seen = jnp.zeros(())

        def __call__(self, x):
            self.seen = self.seen + 1
            return x * self.w[None]

    model, scaler = Counted(), nnx.precision.DynamicScale()
    run = nnx.jit(lambda model, s, x: s.value_and_grad(loss_of)(model, x)[0])
    run(model, scaler, GOOD)
    run(model, scaler, BAD)
    assert model.seen == 1


@pytest.mark.filterwarnings("ignore:Hooks:UserWarning")
@pytest.mark.parametrize("x", [1.0, jnp.inf])
def test_variables_with_hooks_take_the_steps_of_those_without(x):
    hooks = {"on_get_value": lambda _, x: 2 * x, "on_set_value": lambda _, x: x / 2}
    hooked = nnx.Dict(w=nnx.Param(jnp.array(3.0), **hooks))
    plain = nnx.Dict(w=nnx.Param(hooked.w.get_raw_value()))
    for model, factor in ((hooked, 1.0), (plain, 2.0)):
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
        scaler = nnx.precision.DynamicScale()
        gradient = scaler.value_and_grad(
            lambda model, x, c: (c * model.w[...] * x) ** 2
        )
        _, grads = gradient(model, x, factor)
        scaler.update(optimizer, model, grads)
    assert hooked.w.get_raw_value() == plain.w.get_raw_value()
    assert (plain.w[...] == 3.0) == (x == jnp.inf)


def test_models_in_array_refs_are_left_alone_too():
    net = nnx.with_vars(zoo.Block(), ref=True)
    optimizer = nnx.Optimizer(net, optax.adam(0.1), wrt=nnx.Param)
    scaler = nnx.precision.DynamicScale()
    gradient = nnx.jit(lambda scaler, net, x: scaler.value_and_grad(loss_of)(net, x))
    for x, moves in ((BAD, False), (GOOD, True)):
        before = contents(net, optimizer)
        plain = nnx.to_arrays(net)  # gradients of refs are refused
        _, grads = gradient(scaler, plain, x)
        scaler.update(optimizer, net, grads)
        assert same(contents(net, optimizer), before) is not moves


@tables.cases(
    "options",
    {"growth_factor": 1.0},
    {"backoff_factor": 1.5},
    {"growth_interval": 0},
    {"scale": 0.0},
    {"scale": 1.0, "minimum_scale": 2.0},
    {"scale": 1e39},
)
def test_arguments_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match="DynamicScale expects"):
        nnx.precision.DynamicScale(**options)


@pytest.mark.peers
@tables.cases(
    "options",
    {"scale": 2.0**16, "growth_interval": 2},
    {"scale": 3.0, "growth_interval": 1, "growth_factor": 3.0},
    {"scale": 1.0, "backoff_factor": 0.25, "minimum_scale": 0.1},
    {"scale": 2.0**127, "growth_interval": 1},
)
def test_the_scale_moves_as_that_of_the_peer(options):
    pytest.importorskip("flax")
    from flax.training import dynamic_scale

    ours = nnx.precision.DynamicScale(**options)
    options = {"fin_steps": 0} | options | {"scale": jnp.float32(options["scale"])}
    theirs = dynamic_scale.DynamicScale(**options)
    weight = nnx.Dict(w=nnx.Param(jnp.array([1e-3, 2.0])))
    ours_step = nnx.jit(lambda s, m, x: s.value_and_grad(lambda m: (m.w * x).sum())(m))
    theirs_step = jax.jit(lambda s, w, x: s.value_and_grad(lambda w: (w * x).sum())(w))
    for x in [1.0, 2.0, 1.0, 1.0, INF, INF, 1.0, 1.0, 1.0, jnp.nan, 1.0, 1e-8]:
        value, grads = ours_step(ours, weight, x)
        theirs, is_finite, expected, wanted = theirs_step(theirs, weight.w[...], x)
        if jnp.isfinite(expected):  # theirs is divided by the scale again
            np.testing.assert_allclose(value, expected, rtol=1e-6)
        np.testing.assert_array_equal(grads.w[...], wanted)
        np.testing.assert_array_equal(ours.is_finite[...], is_finite)
        np.testing.assert_array_equal(ours.scale[...], theirs.scale)
        np.testing.assert_array_equal(ours.finite_steps[...], theirs.fin_steps)
