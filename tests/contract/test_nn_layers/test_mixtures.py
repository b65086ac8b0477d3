"""Mixtures of experts: routers, experts, what is sorted, lost, recorded and divided.

The truth is a mixture that computes all experts for all tokens, in float64.
"""

import functools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import graftree as nnx
from tests import exact, meshes, tables
from tests.random_arrays import random

F, H, E, K = 8, 12, 6, 2  # features, hidden, experts, choices


def router(**options):
    return nnx.Router(F, E, **{"top_k": K, "rngs": nnx.Rngs(0)} | options)


def gated(seed=1, num_experts=E, **options):
    return nnx.GatedExperts(num_experts, F, H, rngs=nnx.Rngs(seed), **options)


def stacked(seed=1, num_experts=E, **options):
    def make(rngs):
        return nnx.Sequential(
            nnx.Linear(F, H, rngs=rngs), nnx.tanh, nnx.Linear(H, F, rngs=rngs)
        )

    return nnx.Stack(make, num_experts, rngs=nnx.Rngs(seed), **options)


def mixture(experts=gated, routing=None, **options):
    return nnx.MixtureOfExperts(router(**routing or {}), experts(), **options)


def by_all_experts(model, x):
    """The mixture, with all experts for all tokens."""
    routing, experts = model.router(x), model.experts
    is_chosen = jax.nn.one_hot(routing.experts, E, dtype=routing.weights.dtype)
    weights = (is_chosen * routing.weights[..., None]).sum(axis=-2)
    inputs = jnp.broadcast_to(x[..., None, :], (*x.shape[:-1], E, F))
    if model.weigh_inputs:
        inputs, weights = inputs * weights[..., None], is_chosen.sum(axis=-2)
    if isinstance(experts, nnx.Stack):
        outputs = [expert(inputs[..., e, :]) for e, expert in enumerate(experts)]
        outputs = jnp.stack(outputs, axis=-2)
    else:
        hidden = [affine(part, inputs) for part in (experts.gate, experts.up)]
        outputs = affine(experts.down, experts.activation(*hidden))
    return (outputs * weights[..., None]).sum(axis=-2)


def affine(part, x):
    product = jnp.einsum("...ei,eio->...eo", x, part.kernel[...])
    if part.bias is None:
        return product
    return product + part.bias[...].reshape((1,) * (x.ndim - 2) + part.bias.shape)


def called(model, x):
    return model(x)


def with_grads(call, model, x):
    """What a call gives, and the gradients of model and inputs, as one program."""

    def loss_of(model, x):
        y = call(model, x)
        return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(y)), y

    gradient = nnx.grad(loss_of, argnums=(0, 1), has_aux=True)
    return nnx.jit(gradient)(model, x)


@nnx.jit
def loads_of(model, x, *mask):
    """What the routers record in a call."""
    return nnx.capture(model, nnx.RouterLoad)(x, *mask)[1]


def check_same(actual, expected, rtol=1e-5, atol=1e-6):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


# ---------------------------------------------------------------------------- numbers


EXPERTS = {
    "gated": gated,
    "clamped": functools.partial(
        gated, use_bias=True, activation=nnx.mixtures.clamped_swiglu
    ),
    "stack": stacked,
}
ROUTERS = {
    "softmax": {},
    "bias": {"use_bias": True, "top_k": 3},
    "groups": {
        "score_fn": nnx.sigmoid,
        "num_groups": 3,
        "top_groups": 2,
        "scale": 2.5,
        "use_correction": True,
    },
    "not normalized, one": {"normalize": False, "top_k": 1},
    "all experts": {"top_k": E},
    "inputs weighted": {"score_fn": nnx.sigmoid, "normalize": False},
}


@exact.in_float64
@pytest.mark.parametrize("routing", ROUTERS)
@pytest.mark.parametrize("experts", EXPERTS)
def test_a_mixture_is_that_of_all_experts_in_values_and_gradients(experts, routing):
    weigh_inputs = routing == "inputs weighted"
    model = mixture(EXPERTS[experts], ROUTERS[routing], weigh_inputs=weigh_inputs)
    for n, (_, variable) in enumerate(nnx.to_flat_state(nnx.state(model))):
        variable.set_value(jnp.asarray(exact.random(*variable.shape, seed=n)))
    x = jnp.asarray(exact.random(2, 7, F, seed=90))
    found = with_grads(called, model, x)
    check_same(found, with_grads(by_all_experts, model, x), rtol=1e-10, atol=1e-12)


def softmax(x):
    return np.exp(x) / np.exp(x).sum(axis=-1, keepdims=True)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def routed(
    logits, correction, *, score_fn, normalize, scale, num_groups, top_groups, k
):
    """The choice and the weights, token by token."""
    experts, weights = [], []
    for row in logits:
        scores = score_fn(row)
        choice = scores + correction
        members = np.split(np.arange(len(row)), num_groups)
        best = [-np.sort(choice[group])[::-1][:2].sum() for group in members]
        allowed = np.concatenate([members[g] for g in np.argsort(best)[:top_groups]])
        chosen = sorted(allowed, key=lambda e: -choice[e])[:k]
        own = scores[chosen] / (scores[chosen].sum() if normalize else 1)
        experts.append(chosen)
        weights.append(scale * own)
    return np.array(experts), np.array(weights)


@exact.in_float64
@tables.cases(
    "score, normalize, scale, num_groups, top_groups, k",
    ("softmax", True, 1.0, 1, 1, 2),
    ("softmax", False, 1.0, 1, 1, 3),
    ("sigmoid", True, 2.5, 3, 2, 4),
    ("sigmoid", False, 1.0, 6, 2, 2),
    ("softmax", True, 1.0, 2, 1, 3),
)
def test_a_router_is_its_formula(score, normalize, scale, num_groups, top_groups, k):
    settings = {"normalize": normalize, "scale": scale, "num_groups": num_groups}
    settings |= {"top_groups": top_groups}
    layer = router(
        score_fn=getattr(nnx, score),
        top_k=k,
        use_bias=True,
        use_correction=True,
        param_dtype=jnp.float64,
        **settings,
    )
    layer.bias[...] = exact.random(E, seed=1)
    layer.correction[...] = 0.3 * exact.random(E, seed=2)
    x = exact.random(20, F, seed=3)
    routing = nnx.jit(lambda layer, x: layer(x))(layer, x)
    logits = x @ np.asarray(layer.kernel[...]) + np.asarray(layer.bias[...])
    correction = np.asarray(layer.correction[...])
    function = {"softmax": softmax, "sigmoid": sigmoid}[score]
    experts, weights = routed(logits, correction, score_fn=function, k=k, **settings)
    np.testing.assert_array_equal(routing.experts, experts)
    exact.agree(routing.weights, weights)
    exact.agree(routing.logits, logits)


def test_equal_scores_choose_the_first_experts_as_top_k_does():
    layer = router(top_k=3)
    layer.kernel[...] = jnp.zeros((F, E))
    x = random(4, F)
    np.testing.assert_array_equal(layer(x).experts, [[0, 1, 2]] * 4)


@pytest.mark.long
def test_experts_without_tokens_and_tokens_without_batch():
    model = mixture(routing={"top_k": 1, "use_bias": True})
    model.router.bias[...] = jnp.array([-99.0, -99.0, 99.0, -99.0, -99.0, -99.0])
    x = random(5, F)
    grads, y = with_grads(called, model, x)
    check_same((grads, y), with_grads(by_all_experts, model, x))
    used = np.asarray(jnp.abs(grads[0].experts.gate.kernel[...]).sum((1, 2)) > 0)
    np.testing.assert_array_equal(used, [0, 0, 1, 0, 0, 0])
    np.testing.assert_allclose(model(x[0]), y[0], rtol=1e-5)
    assert model(jnp.zeros((0, F))).shape == (0, F)


def test_accelerators_get_a_ragged_dot(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    options = {"use_bias": True, "rngs": nnx.Rngs(0)}
    # Of a size that no other test has compiled.
    model = mixture(lambda: nnx.GatedExperts(E, F, 7, **options))
    x = random(3, 4, F)
    text = str(jax.make_jaxpr(lambda x: model(x))(x))
    assert "ragged_dot" in text and "cond[" not in text
    found = with_grads(called, model, x)
    check_same(found, with_grads(by_all_experts, model, x))


def test_rows_of_any_groups_meet_their_kernel():
    for count, num_groups in ((1, 3), (5, 1), (31, 40), (64, 8)):
        rng = np.random.default_rng(count)
        layer = nnx.GroupedLinear(num_groups, 3, 2, rngs=nnx.Rngs(0))
        call = nnx.jit(lambda m, *args: m(*args))
        for used in (0, count // 2, count):  # what becomes of other rows is undefined
            of_row = np.sort(rng.integers(0, num_groups, used))
            sizes = np.bincount(of_row, minlength=num_groups)
            rows = random(count, 3, seed=used)
            found = call(layer, rows, jnp.asarray(sizes))
            kernels = np.asarray(layer.kernel[...])[of_row]
            expected = np.einsum("nf,nfo->no", np.asarray(rows)[:used], kernels)
            np.testing.assert_allclose(found[:used], expected, rtol=1e-5, atol=1e-6)


def test_gradients_in_a_shard_map_that_checks_types_are_those_of_one_device():
    """JAX would sum that of the kernel in a branch that not all devices take."""
    layer, rows = nnx.GroupedLinear(4, 3, 2, rngs=nnx.Rngs(0)), random(16, 3)
    sizes = jnp.array([[5, 0, 1, 2], [0, 8, 0, 0]])
    of_each = functools.partial(
        jax.shard_map,
        mesh=meshes.mesh_of("Auto", x=2),
        in_specs=(P(), P("x"), P("x")),
        out_specs=P("x"),
        check_vma=True,
    )(lambda layer, rows, sizes: layer(rows, sizes[0]))

    def on_one(layer, rows, sizes):
        halves = zip(jnp.split(rows, 2), sizes, strict=True)
        return jnp.concatenate([layer(half, own) for half, own in halves])

    def gradient(call):
        def loss(layer, rows):
            return jnp.sum(jnp.sin(call(layer, rows, sizes)))

        return jax.jit(jax.grad(loss, argnums=(0, 1)))(layer, rows)

    check_same(gradient(of_each), gradient(on_one))


@pytest.mark.parametrize("num_groups", [2, 8, 64, 512])
def test_the_rows_multiplied_do_not_grow_with_the_number_of_groups(num_groups):
    layer = nnx.GroupedLinear(num_groups, 3, 2, rngs=nnx.Rngs(0))
    sizes = jnp.zeros(num_groups, int)
    program = jax.make_jaxpr(lambda x: layer(x, sizes))(jnp.ones((4096, 3)))
    shapes = re.findall(r"f32\[(\d+),(\d+),3\]", str(program))
    (blocks, size), *_ = {(int(n), int(m)) for n, m in shapes}
    assert 4096 <= blocks * size <= 1.5 * 4096


# ---------------------------------------------------------------------------- padding


@pytest.mark.long
@pytest.mark.parametrize("experts", ["gated", "stack"])
def test_padding_of_any_value_changes_nothing(experts):
    model = mixture(EXPERTS[experts], weigh_inputs=experts == "stack")
    x, mask = random(3, 5, F), jnp.arange(5)[None] < jnp.array([[5], [2], [0]])
    padded = jnp.where(mask[..., None], x, jnp.nan)

    def of_tokens(call):
        return lambda m, x: jnp.where(mask[..., None], call(m, x), 0)

    found = with_grads(of_tokens(lambda m, x: m(x, mask)), model, padded)
    check_same(found, with_grads(of_tokens(by_all_experts), model, x))
    assert (model(padded, mask)[~mask] == 0).all()
    check_same(loads_of(model, padded, mask), loads_of(model, x[mask]))


# ------------------------------------------------------------------- losses and loads


def test_losses_are_their_formulas():
    model, x = mixture(routing={"top_k": 3}), random(4, 5, F)
    loads = loads_of(model, x)
    logits = np.float64(x).reshape(20, F) @ np.float64(model.router.kernel[...])
    chosen = np.argsort(-logits, axis=1)[:, :3]
    shares = np.bincount(chosen.ravel(), minlength=E) / 20
    expected = E * (shares * softmax(logits).mean(axis=0)).sum()
    found = nnx.mixtures.load_balance_loss(loads)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    z = (np.log(np.exp(logits).sum(axis=1)) ** 2).mean()
    np.testing.assert_allclose(nnx.mixtures.z_loss(loads), z, rtol=1e-5)
    found = nnx.mixtures.expert_shares(loads)["load"].get_value()
    np.testing.assert_allclose(found, shares / 3, rtol=1e-5)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.mixture = nnx.MixtureOfExperts(
            nnx.Router(F, E, top_k=K, rngs=rngs), nnx.GatedExperts(E, F, H, rngs=rngs)
        )

    def __call__(self, x):
        return x + self.mixture(x)


class Model(nnx.Module):
    def __init__(self, kind, rngs):
        self.kind = kind
        if kind == "list":
            self.blocks = nnx.List([Block(rngs) for _ in range(3)])
        else:
            self.blocks = nnx.Stack(Block, 3, remat=kind == "remat", rngs=rngs)

    def __call__(self, x):
        if self.kind != "list":
            return self.blocks(x)
        for block in self.blocks:
            x = block(x)
        return x


def auxiliary_loss(model, x):
    y, loads = nnx.capture(model, nnx.RouterLoad)(x)
    balance = nnx.mixtures.load_balance_loss(loads)
    return jnp.mean(y**2) + balance + 0.1 * nnx.mixtures.z_loss(loads)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["stack", "remat"])
def test_losses_of_a_stack_are_those_of_a_list(kind):
    x = random(4, 5, F)
    losses, grads = [], []
    for each in ("list", kind):
        model = Model(each, nnx.Rngs(0))
        loss, gradient = nnx.jit(nnx.value_and_grad(auxiliary_loss))(model, x)
        losses.append(loss)
        leaves = nnx.to_flat_state(gradient)
        norms = Counter()
        for path, leaf in leaves:
            norms[path[-3:]] += float(jnp.sum(leaf[...] ** 2))
        grads.append(norms)
        tokens = [x.tokens for x in _loads(loads_of(model, x))]
        assert sum(map(jnp.sum, tokens)) == 3 * 20
    np.testing.assert_allclose(*losses, rtol=1e-5)
    assert grads[0].keys() == grads[1].keys()
    for name, norm in grads[0].items():
        np.testing.assert_allclose(grads[1][name], norm, rtol=1e-4)


def _loads(tree):
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, nnx.mixtures.Load))
    return [x for x in leaves if isinstance(x, nnx.mixtures.Load)]


@pytest.mark.long
def test_losses_with_accumulation_are_means_over_the_parts():
    model, x = Model("stack", nnx.Rngs(0)), random(4, 5, F)
    accumulated = nnx.memory.value_and_grad(auxiliary_loss, 2)
    loss, grads = nnx.jit(accumulated)(model, x)
    parts = [
        nnx.value_and_grad(auxiliary_loss)(model, half) for half in (x[::2], x[1::2])
    ]
    np.testing.assert_allclose(loss, (parts[0][0] + parts[1][0]) / 2, rtol=1e-5)
    mean = jax.tree.map(lambda a, b: (a + b) / 2, parts[0][1], parts[1][1])
    check_same(grads, mean, rtol=1e-4)


@pytest.mark.long
def test_loads_of_two_calls_add_up_and_nothing_stays():
    model, x = mixture(), random(4, F)
    before = nnx.graphdef(model)

    def twice(model):
        return model(x), model(x[:3])

    _, loads = nnx.capture(twice, nnx.RouterLoad)(model)
    assert loads["load"].get_value().tokens == 7
    model(x)
    assert nnx.graphdef(model) == before and not nnx.state(model, nnx.RouterLoad)


def test_total_load_is_that_of_all_tokens_in_one_layer():
    layers = [mixture(routing={"top_k": 3, "rngs": nnx.Rngs(seed)}) for seed in (0, 5)]
    loads = [loads_of(layer, random(4, 5, F)) for layer in layers]
    total = nnx.mixtures.total_load(loads)
    each = [load["load"].get_value() for load in loads]
    check_same(total, each[0] + each[1])
    layered = jax.tree.map(lambda *xs: jnp.stack(xs), *each)
    check_same(nnx.mixtures.total_load(layered), total)


@pytest.mark.long
def test_balance_steers_tokens_to_experts_that_have_few():
    model = mixture(routing={"use_correction": True, "top_k": 1})
    x = random(200, F)

    def largest_share():
        shares = nnx.mixtures.expert_shares(loads_of(model, x))
        return shares["load"].get_value().max()

    first = largest_share()
    for _ in range(60):
        model.router.balance(loads_of(model, x)["load"].get_value(), rate=0.01)
    assert largest_share() < 0.19 < 0.21 < first
    assert not nnx.state(model.router, nnx.Param).get("correction")


# --------------------------------------------------------------------- jitter, dtypes


def test_jitter_draws_anew_until_the_model_is_set_to_eval():
    layer = router(jitter=0.1, rngs=nnx.Rngs(0, jitter=7))
    x = jnp.ones((50, F))
    first, second = layer(x).logits, layer(x).logits
    assert not jnp.array_equal(first, second) and not jnp.array_equal(
        first[0], first[1]
    )
    layer.kernel[...] = jnp.eye(F, E)
    noisy = layer(x).logits
    assert 0.9 <= noisy.min() < 0.95 and 1.05 < noisy.max() <= 1.1
    layer.eval()
    np.testing.assert_array_equal(layer(x).logits, jnp.ones((50, E)))


def test_a_router_computes_in_float32_whatever_the_model_computes_in():
    model = mixture()
    x = random(4, 5, F)
    scores = model.router(x.astype(jnp.bfloat16)).scores
    nnx.precision.set_policy(model, "params=f32, compute=bf16")
    routing = model.router(x.astype(jnp.bfloat16))
    assert routing.weights.dtype == jnp.float32
    np.testing.assert_array_equal(routing.scores, scores)
    y = model(x.astype(jnp.bfloat16))
    assert y.dtype == jnp.bfloat16
    expected = nnx.jit(by_all_experts)(mixture(), x)
    np.testing.assert_allclose(y.astype(float), expected, rtol=0.05, atol=0.05)


# ---------------------------------------------------------------------- many devices


DIVISIONS = {
    "experts": ({"expert": 2}, "expert", ()),
    "experts, with their tokens": ({"expert": 2}, "expert", ("expert",)),
    "tokens": ({"data": 4}, None, ("data",)),
    "features": ({"model": 4}, None, ()),
    "tokens and experts": ({"data": 2, "expert": 2}, "expert", ("data",)),
    "both": ({"expert": 2, "model": 2}, "expert", ("expert",)),
    "all": ({"data": 2, "expert": 2, "model": 2}, "expert", ("data", "expert")),
}
SENT = {
    "experts": {"all-reduce": 1},
    "experts, with their tokens": {"all-gather": 3, "reduce-scatter": 1},
    "tokens": {},
    "features": {"all-reduce": 1},
    "tokens and experts": {"all-reduce": 1},
}


def divided(model, sizes, expert_axis, token_axes, x):
    """The model and its inputs on a mesh that is set."""
    mesh = jax.sharding.get_abstract_mesh()
    model = nnx.clone(model)
    model.expert_axis, model.token_axes = expert_axis, token_axes
    features = "model" if "model" in sizes else None

    def place(x, *spec):
        sharding = NamedSharding(jax.sharding.get_mesh(), P(*spec))
        return jax.device_put(x, sharding)

    for _, variable in nnx.to_flat_state(nnx.state(model.experts)):
        variable.set_value(place(variable.get_value(), expert_axis))
    if isinstance(model.experts, nnx.GatedExperts):
        for part in (model.experts.gate, model.experts.up):
            kernel = part.kernel.get_value()
            part.kernel.set_value(place(kernel, expert_axis, None, features))
        down = model.experts.down.kernel
        down.set_value(place(down.get_value(), expert_axis, features))
    assert not mesh.empty
    return model, place(x, token_axes or None)


@pytest.mark.parametrize("experts", ["clamped", "stack"])
@pytest.mark.parametrize("name", DIVISIONS)
def test_a_divided_mixture_equals_the_whole_one(name, experts):
    sizes, *axes = DIVISIONS[name]
    model = mixture(EXPERTS[experts], {"top_k": 3}, weigh_inputs=experts == "stack")
    x, call = random(8, 5, F), nnx.capture(called, nnx.RouterLoad)
    expected = with_grads(call, model, x)
    with jax.set_mesh(meshes.mesh_of("Auto", **sizes)):
        found = with_grads(call, *divided(model, sizes, *axes, x))
    check_same(jax.device_get(found), jax.device_get(expected), 1e-4, 1e-5)


@pytest.mark.long
@pytest.mark.parametrize("name", SENT)
def test_what_is_sent(name):
    sizes, *axes = DIVISIONS[name]
    x = random(8, 5, F)
    with jax.set_mesh(meshes.mesh_of("Auto", **sizes)):
        model, placed = divided(mixture(), sizes, *axes, x)
        spec = P(axes[1] or None)
        program = nnx.jit(lambda m, x: jax.lax.with_sharding_constraint(m(x), spec))
        text = program.lower(model, placed).compile().as_text()
    names = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    sent = Counter(re.findall(rf" ({names})(?:-start)?\(", text))
    assert sent == SENT[name]


@pytest.mark.long
def test_few_tokens_are_not_divided_and_no_mesh_is_needed():
    x = random(3, F)
    model = mixture(expert_axis="expert", token_axes=("data", "expert"))
    expected = model(x)
    with jax.set_mesh(meshes.mesh_of("Auto", data=4, expert=2)):
        found = nnx.jit(lambda m, x: m(x))(model, x)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


# --------------------------------------------------------- with the rest of the house


def test_a_table_for_files_with_fused_and_interleaved_experts():
    model = mixture(EXPERTS["clamped"], {"use_bias": True})
    tensors = {
        "router.weight": random(E, F, seed=1),
        "router.bias": random(E, seed=2),
        "experts.gate_up_proj": random(E, F, 2 * H, seed=3),
        "experts.gate_up_proj_bias": random(E, 2 * H, seed=4),
        "experts.down_proj": random(E, H, F, seed=5),
        "experts.down_proj_bias": random(E, F, seed=6),
    }
    tensors = {name: np.asarray(x) for name, x in tensors.items()}
    kernels = [f"experts.{part}.kernel" for part in ("gate", "up")]
    biases = [f"experts.{part}.bias" for part in ("gate", "up")]
    fused = nnx.weights.Mapping(
        {
            "router.weight": ("router.kernel", "o i -> i o"),
            "router.bias": "router.bias",
            "experts.gate_up_proj": (kernels, "e i (o part) -> e i o"),
            "experts.gate_up_proj_bias": (biases, "e (o part) -> e o"),
            "experts.down_proj": "experts.down.kernel",
            "experts.down_proj_bias": "experts.down.bias",
        }
    )
    nnx.weights.load(tensors, model, fused)
    gate_up = tensors["experts.gate_up_proj"]
    np.testing.assert_array_equal(model.experts.gate.kernel[...], gate_up[..., ::2])
    np.testing.assert_array_equal(model.experts.up.kernel[...], gate_up[..., 1::2])


def test_initial_values_of_each_expert_are_scaled_as_those_of_a_linear():
    kernel = nnx.GroupedLinear(64, 256, 8, rngs=nnx.Rngs(0)).kernel[...]
    deviations = kernel.std(axis=(1, 2))
    np.testing.assert_allclose(deviations, 256**-0.5, rtol=0.15)
    init = nnx.with_metadata(nnx.initializers.lecun_normal(), tag="kernel")
    layer = nnx.GroupedLinear(2, 3, 4, kernel_init=init, rngs=nnx.Rngs(0))
    assert (layer.kernel.shape, layer.kernel.tag) == ((2, 3, 4), "kernel")


# -------------------------------------------------------------------------- refusals


@tables.cases(
    "options, message",
    ({"top_k": 7}, r"top_k must be from 1(.|\n)*num_experts=6, top_k=7"),
    ({"top_k": 0}, "top_k must be from 1"),
    ({"num_groups": 4}, "equally many experts"),
    ({"num_groups": 3, "top_groups": 4}, "top_groups must be from 1 to num_groups"),
    ({"num_groups": 6, "top_k": 2}, r"top_k must be(.|\n)*num_experts // num_groups"),
    ({"jitter": 1.0}, r"jitter of a Router must be in \[0, 1\)"),
)
def test_routers_that_can_not_be_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        router(**options)


class Writing(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(F, F, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.linear(x))


def test_what_can_not_be_mixed_is_refused():
    x = jnp.ones((4, F))

    def refuses(call, error, message):
        with pytest.raises(error, match=message):
            jax.eval_shape(call)

    wrong = r"from 6 experts(.|\n)*experts.down.kernel"
    refuses(lambda: mixture(lambda: gated(num_experts=4))(x), ValueError, wrong)
    mask, wrong = jnp.ones((4, 1), bool), "mask must have an entry for each token"
    refuses(lambda: mixture()(x, mask), ValueError, wrong)
    writing = lambda: nnx.Stack(Writing, E, rngs=nnx.Rngs(0))  # noqa: E731
    wrong = r"can't change themselves(.|\n)*RngCount"
    refuses(lambda: mixture(writing)(x), TypeError, wrong)
    wrong = r"no Load(.|\n)*nnx.capture"
    refuses(lambda: nnx.mixtures.z_loss({}), ValueError, wrong)
    wrong = r"no correction(.|\n)*use_correction=True"
    refuses(lambda: router().balance(None), ValueError, wrong)
    with jax.set_mesh(meshes.mesh_of("Auto", expert=4)):
        wrong = r"6 experts, 'expert' has 4 devices"
        refuses(lambda: mixture(expert_axis="expert")(x), ValueError, wrong)
