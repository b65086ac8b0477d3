"""Gradients by parts are those of the whole batch, and need the memory of a part.

At the end what a report of saved values says."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import graftree as nnx
from tests import meshes, tables
from tests.comparisons import raises, unchanged

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(32, 8)).astype("float32")
BATCH = {"x": X, "y": X[:, :2]}


class Net(nnx.Module):
    def __init__(self, width=16):
        rngs = nnx.Rngs(0)
        self.up = nnx.Linear(8, width, rngs=rngs)
        self.down = nnx.Linear(width, 2, rngs=rngs)
        self.calls = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x):
        self.calls[...] += 1
        return self.down(jnp.tanh(self.up(x)))


def loss_fn(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def assert_equal_trees(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("has_aux", [False, True])
def test_value_and_gradients_are_those_of_the_batch(has_aux, is_compiled):
    def loss(model, batch):
        return (loss_fn(model, batch), batch["x"]) if has_aux else loss_fn(model, batch)

    model = Net()
    value, grads = nnx.value_and_grad(loss, has_aux=has_aux)(Net(), BATCH)
    by_parts = nnx.memory.value_and_grad(loss, 4, has_aux=has_aux)
    found, of_parts = (nnx.jit(by_parts) if is_compiled else by_parts)(model, BATCH)
    if has_aux:
        (found, rows), (value, _) = found, value
        # A part has every fourth row.
        np.testing.assert_array_equal(rows[1], X[1::4])
    assert_equal_trees((found, of_parts), (value, grads))
    assert model.calls[...] == 4


# What a loss may be called with. Batches come last; the first five have gradients.
ARGUMENTS = {
    "array": lambda: jnp.arange(4.0),
    "dict": lambda: {"w": jnp.ones(2) * 3, "b": (jnp.ones(()), jnp.zeros(2))},
    "module": lambda: nnx.Linear(2, 2, rngs=nnx.Rngs(1)),
    "state": lambda: nnx.state(nnx.Linear(2, 2, rngs=nnx.Rngs(2))),
    "list": lambda: [nnx.Linear(1, 2, rngs=nnx.Rngs(3)), jnp.ones(2)],
    "flag": lambda: True,
    "function": lambda: jnp.tanh,
    "batch": lambda: X[:8],
    "batches": lambda: {"x": jnp.asarray(X[:8, 0])},
}
KINDS = [*ARGUMENTS]


def number_of(x):
    """A number that depends on all arrays in an argument, a mean over its rows."""
    if x is True or x is jnp.tanh:
        return 1.0  # a tracer is neither
    return sum([jnp.mean(jnp.sin(leaf) + leaf**2) for leaf in jax.tree.leaves(x)])


LATER = [pytest.param(seed, marks=pytest.mark.long) for seed in range(6, 12)]


@pytest.mark.parametrize("seed", [*range(6), *LATER])
def test_any_arguments_give_the_means_over_the_parts(seed):
    random = np.random.default_rng(seed)
    kinds = [random.choice(KINDS[:5]), random.choice(KINDS[7:])]
    kinds = random.permutation([*kinds, *random.choice(KINDS, size=2)])
    given = [ARGUMENTS[kind]() for kind in kinds]
    places = [i for i, kind in enumerate(kinds) if kind in KINDS[:5]]
    chosen = random.permutation(places)[: random.integers(1, 3)]
    others = [i for i, x in enumerate(kinds) if x in ("array", "dict", *KINDS[5:7])]
    argnums, whole = [
        [int(i) - len(kinds) * random.integers(2) for i in listed]
        for listed in (chosen, others)
    ]
    has_aux = bool(random.integers(2))
    options = {"argnums": argnums if random.integers(2) else argnums[0]}

    def loss(*args):
        value = math.prod(map(number_of, args))
        return (value, {"value": [value]}) if has_aux else value

    def part(i):
        rows = [
            jax.tree.map(lambda a: a[i::2], x) if kind in KINDS[7:] else x
            for x, kind in zip(given, kinds, strict=True)
        ]
        return nnx.value_and_grad(loss, has_aux=has_aux, **options)(*rows)

    found = nnx.memory.value_and_grad(loss, 2, has_aux=has_aux, whole=whole, **options)
    (value, grads), ((a, of_a), (b, of_b)) = found(*given), map(part, range(2))
    if has_aux:
        (value, aux), (a, _), (b, _) = value, a, b
        np.testing.assert_allclose(aux["value"][0], jnp.stack([a, b]), rtol=1e-5)
    np.testing.assert_allclose(value, (a + b) / 2, rtol=1e-5)
    means = jax.tree.map(lambda x, y: (x + y) / 2, of_a, of_b)
    assert jax.tree.structure(grads) == jax.tree.structure(means)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4), grads, means)


@pytest.mark.parametrize("options", [{"argnums": 3}, {"argnums": -4}, {"whole": [-4]}])
def test_positions_that_are_not_there_are_refused(options):
    ((name, number),) = options.items()
    number = number[0] if name == "whole" else number
    by_parts = nnx.memory.value_and_grad(lambda *args: 0.0, 2, **options)
    message = f"{name}={number} of nnx.memory.value_and_grad"
    with pytest.raises(TypeError, match=message):
        by_parts(X, X, X)


class Lazy(nnx.Module):
    """Makes a Variable, and sets a static attribute, in its first call."""

    def __init__(self):
        self.inner = nnx.Linear(8, 2, rngs=nnx.Rngs(0))
        self.is_made = False

    def __call__(self, x):
        if not self.is_made:
            self.is_made, self.total = True, nnx.BatchStat(jnp.zeros(()))
        self.total[...] += jnp.mean(x)
        return self.inner(x)


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_the_first_part_may_make_variables(parts, is_compiled):
    def loss(model, batch):
        return loss_fn(model, batch), batch["x"]

    model = Lazy()
    by_parts = nnx.memory.value_and_grad(loss, parts, has_aux=True)
    by_parts = nnx.jit(by_parts) if is_compiled else by_parts
    (value, rows), grads = by_parts(model, BATCH)
    expected, of_batch = nnx.value_and_grad(loss_fn)(Lazy(), BATCH)
    assert_equal_trees((value, grads), (expected, of_batch))
    np.testing.assert_array_equal(rows, np.stack([X[i::parts] for i in range(parts)]))
    assert model.is_made
    np.testing.assert_allclose(model.total[...], parts * X.mean(), rtol=1e-4)


def sowing(model, x):
    model.sow(nnx.Intermediate, "sown", x)


def counting(model, x):
    model.count = getattr(model, "count", 0) + 1


def replacing(model, x):
    model.last = nnx.Intermediate(x)


@pytest.mark.filterwarnings("ignore:Calling Module.sow")
@tables.cases(
    "change, where",
    (sowing, r"sown.value: \(\*,\) before a part, \(\*, \*\) after it"),
    (counting, "count: 1 before a part, 2 after it"),
    (replacing, "last: one Intermediate before a part, a different one after it"),
)
def test_a_structure_that_never_settles_is_refused_in_words_of_the_call(change, where):
    def loss(batch, model):
        change(model, batch["x"])
        return loss_fn(model, batch)

    model = Net()
    graphdef = nnx.graphdef(model)
    with unchanged(model), raises(ValueError, "args[1]") as caught:
        nnx.memory.value_and_grad(loss, 2, argnums=1)(BATCH, model)
    said = str(caught.value)
    assert re.search(where, said) and "nnx.scan" not in said
    nnx.memory.value_and_grad(loss, 1, argnums=1)(BATCH, model)
    assert nnx.graphdef(model) != graphdef


@pytest.mark.filterwarnings("ignore:Calling Module.sow")
def test_what_is_sown_can_be_returned():
    def loss(model, batch):
        sowing(model, jnp.mean(batch["x"]))
        return loss_fn(model, batch), nnx.pop(model, nnx.Intermediate)

    model = Net()
    (_, sown), _ = nnx.memory.value_and_grad(loss, 2, has_aux=True)(model, BATCH)
    expected = [X[::2].mean(), X[1::2].mean()]
    np.testing.assert_allclose(sown["sown"].get_value()[0], expected, rtol=1e-5)


@tables.cases(
    "aux, where",
    (lambda model: "name", "aux: a str"),
    (lambda model: {"m": model}, r"aux\['m'\]: a Net with parts of an argument"),
    (lambda model: nnx.state(model), "with parts of an argument"),
    (lambda model: (1.0, len), r"aux\[1\]: a builtin"),
)
def test_what_can_not_be_stacked_is_refused_as_second_output(aux, where):
    def loss(model, batch):
        return loss_fn(model, batch), aux(model)

    model = Net()
    with pytest.raises(TypeError, match=where):
        nnx.memory.value_and_grad(loss, 2, has_aux=True)(model, BATCH)
    assert model.calls[...] == 0


@tables.cases("parts, error", (0, ValueError), (-2, ValueError), (2.5, TypeError))
def test_the_number_of_parts_is_checked_first(parts, error):
    with pytest.raises(error, match=f"got micro_batches={parts}"):
        nnx.memory.value_and_grad(loss_fn, parts)


def test_other_arguments_are_whole_or_objects(graph):
    # Without graph updates, gradients have the form of what is differentiated.
    def loss(weight, x, factor, counts):
        counts["calls"][...] += 1
        return jnp.mean(x * weight) * factor

    counts = {"calls": nnx.Variable(jnp.array(0))}
    with nnx.set_graph_mode(graph):
        by_parts = nnx.memory.value_and_grad(loss, 2, whole=[2])
        value, grads = by_parts(jnp.array(3.0), X, jnp.array(2.0), counts)
    np.testing.assert_allclose(grads, 2 * X.mean(), rtol=1e-4)
    np.testing.assert_allclose(value, 6 * X.mean(), rtol=1e-4)
    assert counts["calls"][...] == 2


def test_half_precision_is_summed_in_float32():
    def loss(weight, x):
        return jnp.mean(weight * x)

    # In bfloat16, 256 + 1 is 256.
    x = jnp.concatenate([jnp.full(1, 256.0), jnp.ones(255)]).astype(jnp.bfloat16)
    weight = jnp.ones((), jnp.bfloat16)
    _, grad = nnx.memory.value_and_grad(loss, 256)(weight, x)
    assert grad.dtype == jnp.bfloat16 and grad == jnp.bfloat16((256 + 255) / 256)


# ------------------------------------------------ losses that return (sum, count)

# Of 4, 1, 0 and 2 tokens; two parts have 4 and 3, four have as many as the rows.
TOKENS = np.array([[1, 2, 3, 4], [5, 0, 0, 0], [0, 0, 0, 0], [6, 7, 0, 0]])
counted = functools.partial(nnx.memory.value_and_grad, has_count=True)


def sum_and_count(table, tokens, weights=None):
    """The squares of what a table has for each token that counts."""
    weights = tokens != 0 if weights is None else weights
    losses = table[tokens].astype(jnp.float32) ** 2
    return jnp.sum(losses * weights), jnp.sum(weights)


def mean_and_gradient(table, tokens, weights):
    """The same as a mean, and its gradient, in float64."""
    table = np.asarray(table, "float64")
    share = np.bincount(tokens.ravel(), weights.ravel(), len(table)) / weights.sum()
    return np.sum(share * table**2), 2 * share * table


WEIGHTS = {
    "by default": None,
    "booleans": TOKENS != 0,
    "small integers": (TOKENS != 0).astype("int8"),
    "fractions": TOKENS / np.float32(7),
    "half precision": (TOKENS / 8).astype("float16"),
    "that cancel in a part": np.outer([1, 1, -1, 2], [1, 2, 3, 4]).astype("float32"),
}


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("is_compiled", [False, True])
def test_what_counts_is_averaged_over_the_whole_batch(kind, parts, is_compiled):
    table, weights = jnp.linspace(-1, 2, 8), WEIGHTS[kind]
    args = (TOKENS,) if weights is None else (TOKENS, weights)
    by_parts = counted(sum_and_count, parts)
    found = (nnx.jit(by_parts) if is_compiled else by_parts)(table, *args)
    weights = np.asarray(TOKENS != 0 if weights is None else weights, "float64")
    expected = mean_and_gradient(table, TOKENS, weights)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == jnp.float32
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


def test_the_second_output_of_a_loss_with_a_count_is_stacked():
    def loss(model, tokens):
        pair = sum_and_count(model["table"], tokens)
        model["count"][...] += pair[1]
        return pair, {"tokens": pair[1]}

    model = nnx.Dict(table=nnx.Param(jnp.ones(8)), count=nnx.Variable(jnp.array(0)))
    (value, aux), grads = nnx.jit(counted(loss, 4, has_aux=True))(model, TOKENS)
    np.testing.assert_array_equal(aux["tokens"], [4, 1, 0, 2])
    assert value == 1 and model["count"][...] == 7
    expected = mean_and_gradient(np.ones(8), TOKENS, TOKENS != 0)[1]
    np.testing.assert_allclose(grads["table"], expected, rtol=1e-6)


def test_the_first_part_may_make_variables_that_later_ones_count_in():
    def loss(model, batch):
        return jnp.sum(model(batch["x"]) ** 2), len(batch["x"])

    model = Lazy()
    value, _ = counted(loss, 4)(model, BATCH)
    expected, _ = counted(loss, 1)(Lazy(), BATCH)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    assert model.is_made


@pytest.mark.parametrize("parts", [1, 2])
def test_if_nothing_counts_the_mean_is_nan_and_the_gradient_zero(parts):
    value, grads = counted(sum_and_count, parts)(jnp.ones(8), np.zeros((2, 3), int))
    assert jnp.isnan(value) and not grads.any()


def test_gradients_in_float16_have_the_size_of_those_of_the_mean():
    # The sum of 70,000 ones is inf in float16, and so would be its gradient.
    def loss(weight, x):
        return jnp.sum((weight * x).astype(jnp.float32)), x.size

    x, weight = jnp.ones((4, 70_000), jnp.float16), jnp.ones((), jnp.float16)
    value, grad = counted(loss, 2)(weight, x)
    assert value == 1 and grad.dtype == jnp.float16
    np.testing.assert_allclose(grad, 1, rtol=1e-2)


def test_derivatives_of_the_gradient_are_those_of_the_whole_batch():
    def gradient_norm(weights, of_gradient):
        _, grads = of_gradient(jnp.linspace(-1, 2, 8), TOKENS, weights)
        return jnp.sum(grads**2)

    def mean(*args):
        total, count = sum_and_count(*args)
        return total / count

    weights = jnp.asarray(TOKENS / 7, jnp.float32)
    expected = jax.grad(gradient_norm)(weights, jax.value_and_grad(mean))
    for parts in (1, 2):
        found = jax.grad(gradient_norm)(weights, counted(sum_and_count, parts))
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("parts", [1, 2])
def test_a_count_that_depends_on_what_is_differentiated_is_refused(parts):
    def loss(table, tokens, wrapped=lambda x: x):
        weights = jnp.exp(table)[tokens]
        return sum_and_count(table, tokens, wrapped(weights))

    with raises(ValueError, "the count depends on", "jax.lax.stop_gradient(count)"):
        counted(loss, parts)(jnp.ones(8), TOKENS)
    with raises(ValueError, "the count depends on"):
        counted(nnx.jit(loss), parts)(jnp.ones(8), TOKENS)
    constant = functools.partial(loss, wrapped=jax.lax.stop_gradient)
    for f in (constant, nnx.remat(constant), nnx.jit(constant)):
        value, _ = counted(f, parts)(jnp.ones(8), TOKENS)
        np.testing.assert_allclose(value, 1, rtol=1e-6)


@tables.cases(
    "out, where",
    (lambda x: x.sum(), "returned shape ()"),
    (lambda x: (x, 1), "returned (shape (8,), shape ())"),
    (lambda x: (x.sum(), "n"), "returned (shape (), a str)"),
    (lambda x: (x.sum(), 1, 2), "returned a tuple"),
    (lambda x: (jnp.int32(3), 1), "returned (shape (), shape ())"),
    (lambda x: (x.sum(), 1j), "returned (shape (), shape ())"),
)
def test_losses_without_the_pair_are_refused(out, where):
    with raises(TypeError, "the sum of what counts", where, "losses.sum(where=mask)"):
        counted(lambda w, x: out(w * x.mean()), 2)(jnp.ones(8), X)


def test_devices_of_shard_map_sum_what_counts():
    mesh, spec = meshes.mesh_of(data=4), P("data")
    axis = "data"

    def mapped(loss, parts=2):
        by_parts = counted(loss, parts)
        return jax.shard_map(
            by_parts, mesh=mesh, in_specs=(P(), spec), out_specs=P(), check_vma=True
        )

    def summed(table, tokens):
        return jax.lax.psum(sum_and_count(table, tokens), axis)

    table, tokens = jnp.linspace(-1, 2, 8), np.repeat(TOKENS, 2, axis=0)
    found = jax.jit(mapped(summed))(table, tokens)
    expected = mean_and_gradient(table, tokens, tokens != 0)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    with raises(
        ValueError, "a count of its own", "jax.lax.psum((loss, count), ('data',))"
    ):
        mapped(sum_and_count)(table, tokens)


def test_memory_is_that_of_a_part():
    model, x = Net(512), np.zeros((1024, 8), "float32")
    batch = {"x": x, "y": x[:, :2]}

    def temporaries(f):
        compiled = nnx.jit(f).lower(model, batch).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    whole = temporaries(nnx.value_and_grad(loss_fn))
    parts = temporaries(nnx.memory.value_and_grad(loss_fn, 32))
    num_params = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert parts < whole / 32 + 3 * 4 * num_params < whole


def test_a_divided_batch_stays_where_it_is():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    batch = jax.device_put(BATCH, NamedSharding(mesh, P("data")))
    model = Net()
    nnx.update(model, jax.device_put(nnx.state(model), NamedSharding(mesh, P())))
    step = nnx.jit(nnx.memory.value_and_grad(loss_fn, 4))
    text = step.lower(model, batch).compile().as_text()
    assert "all-reduce" in text
    assert not any(word in text for word in ("all-gather", "all-to-all", "permute"))
    assert_equal_trees(step(model, batch), nnx.value_and_grad(loss_fn)(Net(), BATCH))


def test_gradients_may_be_divided_by_explicit_axes():
    mesh = jax.make_mesh((2,), ("model",), axis_types=(AxisType.Explicit,))
    names = {"out_sharding": (None, "model")}
    with jax.set_mesh(mesh):
        model = nnx.Linear(8, 2, kernel_metadata=names, rngs=nnx.Rngs(0))
        found = nnx.memory.value_and_grad(loss_fn, 4)(model, BATCH)
        assert_equal_trees(found, nnx.value_and_grad(loss_fn)(model, BATCH))
    assert found[1]["kernel"].sharding.spec == P(None, "model")


def test_batches_that_can_not_be_parted_are_refused():
    by_parts = nnx.memory.value_and_grad(loss_fn, 5)
    message = r"5 parts.\n  args\[1\]\['x'\]: shape \(32, 8\)"
    with pytest.raises(ValueError, match=message):
        by_parts(Net(), BATCH)
    with pytest.raises(ValueError, match=r"args\[1\]: a str\n"):
        by_parts(Net(), "x")
    with pytest.raises(ValueError, match="no argument has arrays"):
        nnx.memory.value_and_grad(lambda model: 0.0, 5)(Net())


# ------------------------------------------------------------- reports of what is saved

ONES = jnp.ones((2, 4))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(4, 8, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(8, 4, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.down(jnp.sin(nnx.name(self.up(x), "hidden")))


class Model(nnx.Module):
    def __init__(self, policy=None, stacked=False):
        rngs = nnx.Rngs(0)
        self.blocks = (
            nnx.Stack(Block, 3, remat=policy, rngs=rngs)
            if stacked
            else nnx.List([Block(rngs) for _ in range(3)])
        )
        self.policy = policy

    def __call__(self, x):
        if isinstance(self.blocks, nnx.Stack):
            return self.blocks(x)
        run = nnx.remat(Block.__call__, policy=self.policy)
        for block in self.blocks:
            x = run(block, x)
        return x


def sum_of(model, x):
    return model(x).sum()


def rows(report):
    return [(x.path, x.why, x.shape) for x in report.values if x.why != "argument"]


def test_values_have_the_path_of_their_module_also_in_layers_that_are_alike():
    report = nnx.memory.saved(sum_of, Model(nnx.memory.save("hidden", "down")), ONES)
    assert sorted(rows(report)) == [
        ("model.blocks[0]", "named 'hidden'", (2, 8)),
        ("model.blocks[0].down", "output", (2, 4)),
        ("model.blocks[1]", "named 'hidden'", (2, 8)),
        ("model.blocks[1].down", "output", (2, 4)),
        ("model.blocks[2]", "named 'hidden'", (2, 8)),
    ]
    kernels = {x.path for x in report.values if x.why == "argument"} - {"x"}
    # The input is not differentiated, so the first kernel is not needed.
    assert kernels == {
        *(f"model.blocks[{i}].down.kernel" for i in range(3)),
        *(f"model.blocks[{i}].up.kernel" for i in (1, 2)),
    }
    assert report.bytes == 4 * (3 * 16 + 2 * 8) and report.offloaded_bytes == 0


def test_loops_are_gone_into():
    report = nnx.memory.saved(sum_of, Model(nnx.memory.save("hidden"), True), ONES)
    assert sorted(rows(report)) == [
        ("model.blocks", "carry", (3, 2, 4)),
        ("model.blocks.layers", "named 'hidden'", (3, 2, 8)),
    ]


@pytest.mark.parametrize("stacked", [False, True])
def test_bytes_are_those_that_jax_keeps_and_fall_as_the_policy_says(stacked):
    policies = [
        jax.checkpoint_policies.everything_saveable,
        nnx.memory.save("hidden"),
        jax.checkpoint_policies.nothing_saveable,
    ]
    found = []
    for policy in policies:
        model = Model(policy, stacked)
        report = nnx.memory.saved(sum_of, model, ONES)
        graphdef, state = nnx.split(model)

        def pure(state, graphdef=graphdef):
            return sum_of(nnx.merge(graphdef, state), ONES)

        backward = jax.eval_shape(lambda s, f=pure: jax.vjp(f, s)[1], state)
        kept = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(backward))
        all_bytes = sum(x.bytes for x in report.values)
        assert all_bytes - ONES.nbytes <= kept <= all_bytes
        found.append(report.bytes)
    assert found == sorted(found, reverse=True) and len({*found}) == 3


def test_the_memory_of_the_host_is_told():
    report = nnx.memory.saved(sum_of, Model(nnx.memory.offload("hidden"), True), ONES)
    assert report.offloaded_bytes == 3 * 2 * 8 * 4 and report.bytes == 3 * ONES.nbytes
    assert "total on the host" in str(report) and " host " in str(report)


def test_takes_what_grad_takes():
    def both(w, model, x):
        return jnp.sum(w * model(x)), {"aux": jnp.exp(x)}

    shape = jax.ShapeDtypeStruct(ONES.shape, ONES.dtype)
    report = nnx.memory.saved(both, 2.0, Block(nnx.Rngs(0)), shape, has_aux=True)
    assert rows(report) == [("model.down", "dot_general", (2, 4))]
    argnum = nnx.DiffState(1, nnx.PathContains("down"))
    report = nnx.memory.saved(both, 2.0, Block(nnx.Rngs(0)), ONES, argnums=argnum)
    assert ("model", "sin", (2, 8)) in rows(report)
    of_module = nnx.memory.saved(Block(nnx.Rngs(0)), ONES)
    assert {x.path.partition(".")[0] for x in of_module.values} <= {"Block", "x"}


def test_nothing_is_written_and_no_trace_is_used_again():
    class Counting(Block):
        def __init__(self):
            super().__init__(nnx.Rngs(0))
            self.count = nnx.BatchStat(jnp.array(0))

        def __call__(self, x):
            self.count[...] += 1
            return super().__call__(x)

    model = Counting()
    step = nnx.jit(sum_of)
    nnx.memory.saved(step, model, ONES)
    assert model.count[...] == 0
    step(model, ONES)
    assert model.count[...] == 1
