"""Adapters of PEFT: the logits that PEFT computes, what does not fit; layouts."""

import json
import os
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from examples.models import llama, pretrained
from graftree.weights import loading
from tests import programs, tables
from tests.comparisons import raises
from tests.weights import checkpoints_of_hf
from tests.weights.adapter_of_peft import check_refused, write_adapter
from tests.weights.tensors import numbers

LAYERS = ["**.attention.{query,value}", "**.mlp.down"]


@pytest.mark.parametrize("is_prepared", [False, True])
def test_the_logits_are_those_of_peft(is_prepared, tmp_path):
    folder = checkpoints_of_hf.folder("llama")
    expected = checkpoints_of_hf.expected_of(folder / "lora")
    model = pretrained.load(folder)
    if is_prepared:
        nnx.surgery.add_lora(model, LAYERS, rank=4, alpha=8, rngs=nnx.Rngs(0))
    assert len(nnx.weights.load_adapter(folder / "lora", model, llama.WEIGHTS)) == 9
    logits = programs.in_one_program(model, expected["tokens"])
    np.testing.assert_allclose(logits, expected["logits"], atol=1e-4)
    nnx.weights.save_adapter(tmp_path, model, llama.WEIGHTS)
    file = "adapter_model.safetensors"
    assert (tmp_path / file).read_bytes() == (folder / "lora" / file).read_bytes()
    theirs = json.loads((folder / "lora" / "adapter_config.json").read_text())
    ours = json.loads((tmp_path / "adapter_config.json").read_text())
    for key in ("peft_type", "r", "lora_alpha", "target_modules", "bias"):
        assert ours[key] == theirs[key]


def linear(rngs):
    return nnx.Linear(4, 4, use_bias=False, rngs=rngs)


def make():
    rngs = nnx.Rngs(0)
    return nnx.Dict(blocks=nnx.List([linear(rngs) for _ in range(3)]))


def make_stack():
    return nnx.Dict(blocks=nnx.Stack(linear, 3, rngs=nnx.Rngs(0)))


TABLE = {"h.{i}": "blocks[{i}]"}


def adapted(where="blocks[*]", **options):
    model = make()
    nnx.surgery.add_lora(model, where, rngs=nnx.Rngs(1), **{"rank": 2, **options})
    for layer in model.blocks:
        if hasattr(layer, "lora"):
            layer.lora.lora_b[...] = jnp.ones(layer.lora.lora_b.shape)
    return model


def test_an_adapter_of_a_list_fits_a_stack(tmp_path):
    model, stack = adapted(alpha=6), make_stack()
    nnx.weights.save_adapter(tmp_path, model, TABLE)
    assert nnx.weights.load_adapter(tmp_path, stack, TABLE) == [("blocks", "layers")]
    x = y = np.ones((1, 4), np.float32)
    for layer in model.blocks:
        x = programs.in_one_program(layer, x)
    np.testing.assert_allclose(programs.in_one_program(stack.blocks, y), x, rtol=1e-5)


def test_ranks_and_scales_by_layer(tmp_path):
    model = adapted("blocks[:2]", alpha=6)
    nnx.surgery.add_lora(model, "blocks[2]", rank=3, alpha=5, rngs=nnx.Rngs(2))
    nnx.weights.save_adapter(tmp_path, model, TABLE)
    plain = make()
    nnx.weights.load_adapter(tmp_path, plain, TABLE)
    assert [layer.lora.scale for layer in plain.blocks] == pytest.approx([3, 3, 5 / 3])


def test_layers_that_are_adapted_otherwise_are_listed(tmp_path):
    nnx.weights.save_adapter(tmp_path, adapted(), TABLE)
    model = adapted("blocks[:2]", rank=3)
    before = nnx.to_pure_dict(nnx.state(nnx.clone(model)))
    where = "blocks[0]: the model has rank 3", "blocks[2]: the model has none"
    with raises(ValueError, *where):
        nnx.weights.load_adapter(tmp_path, model, TABLE)
    assert str(before) == str(nnx.to_pure_dict(nnx.state(model)))


def test_a_read_that_fails_leaves_the_model_as_it_was(tmp_path, monkeypatch):
    nnx.weights.save_adapter(tmp_path, adapted(), TABLE)
    model = make()
    before = nnx.graphdef(model)

    def fails(*_):
        raise OSError("the disk is gone")

    monkeypatch.setattr(loading, "arrays_from", fails)
    with pytest.raises(OSError, match="the disk is gone"):
        nnx.weights.load_adapter(tmp_path, model, TABLE)
    assert nnx.graphdef(model) == before


def test_factors_never_stand_beside_the_config_of_others(tmp_path, monkeypatch):
    nnx.weights.save_adapter(tmp_path, adapted(alpha=1), TABLE)
    replace = os.replace

    def is_killed(source, target):
        if target.endswith(".json"):
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", is_killed)
    with pytest.raises(KeyboardInterrupt):
        nnx.weights.save_adapter(tmp_path, adapted(alpha=9), TABLE)
    with pytest.raises(nnx.errors.WeightsError, match=r"adapter_config\.json"):
        nnx.weights.load_adapter(tmp_path, make(), TABLE)
    monkeypatch.undo()
    (tmp_path / "adapter_config.json").mkdir()
    with pytest.raises(nnx.errors.WeightsError, match=r"config\.json is a folder"):
        nnx.weights.save_adapter(tmp_path, adapted(), TABLE)


def test_an_adapter_of_another_model_is_refused(tmp_path):
    nnx.weights.save_adapter(tmp_path, adapted("blocks[1]"), TABLE)
    check_refused(tmp_path, make_stack(), TABLE, "1 of the 3 layers stacked")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["target_modules"] == ["h.1"]  # those with factors
    nnx.weights.save_adapter(tmp_path, adapted(), TABLE)
    check_refused(tmp_path, make(), {"h.0": "blocks[0]"}, r"h\.2\.lora_B\.weight")


@tables.cases(
    "change, said",
    ({"r": 5}, "have unexpected shapes"),
    ({"use_dora": True}, "use_dora"),
    ({"bias": "all"}, "bias"),
    ({"modules_to_save": ["head"]}, "modules_to_save"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights"),
    ({"an_invention_of_next_year": {"a": 1}}, "an_invention_of_next_year"),
    ids=str,
)
def test_other_shapes_and_more_than_lora_are_refused(change, said, tmp_path):
    nnx.weights.save_adapter(tmp_path, adapted(), TABLE)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    check_refused(tmp_path, make(), TABLE, said)


def test_without_lora_alpha_it_is_that_of_peft(tmp_path):
    nnx.weights.save_adapter(tmp_path, adapted(alpha=1), TABLE)
    path, model = tmp_path / "adapter_config.json", make()
    config = json.loads(path.read_text())
    del config["lora_alpha"]
    path.write_text(json.dumps(config))
    nnx.weights.load_adapter(tmp_path, model, TABLE)
    assert model.blocks[0].lora.alpha == 8


def test_there_must_be_something_to_load_and_to_save(tmp_path):
    with pytest.raises(nnx.errors.WeightsError, match=r"adapter_config\.json"):
        nnx.weights.load_adapter(tmp_path, make(), TABLE)
    with pytest.raises(ValueError, match="no layer is adapted"):
        nnx.weights.save_adapter(tmp_path, make(), TABLE)
    with pytest.raises(ValueError, match=r"blocks\[1\]"):
        nnx.weights.save_adapter(tmp_path, adapted(), {"h.0": "blocks[0]"})
    assert not any(tmp_path.iterdir())


A, B = "x.lora_A.weight", "x.lora_B.weight"
EMBED_A, EMBED_B = "x.lora_embedding_A", "x.lora_embedding_B"
LINEAR = partial(nnx.Linear, 5, 3, use_bias=False)
HEADS = partial(nnx.LinearGeneral, 5, (2, 3), use_bias=False)
CONV = partial(nnx.Conv, 5, 3, (3, 2), strides=2, padding="VALID", use_bias=False)


def product(a, b):
    return b @ a


# A layer, its weight in a file, its line, the factors there, and their product.
KINDS = {
    "Linear": (LINEAR, (3, 5), "layer.kernel", {A: (2, 5), B: (3, 2)}, product),
    "GPT-2's Conv1D": (
        LINEAR,
        (5, 3),
        ("layer.kernel", "i o -> i o"),
        {A: (2, 5), B: (3, 2)},
        lambda a, b: (b @ a).T,
    ),
    "heads": (HEADS, (6, 5), "layer.kernel", {A: (2, 5), B: (6, 2)}, product),
    "heads in another order": (
        HEADS,
        (6, 5),
        ("layer.kernel", "(~d h) e -> e h d"),
        {A: (2, 5), B: (6, 2)},
        product,
    ),
    "Conv": (
        CONV,
        (3, 5, 3, 2),
        "layer.kernel",
        {A: (2, 5, 3, 2), B: (3, 2, 1, 1)},
        lambda a, b: np.einsum("orxy,rihw->oihw", b, a),
    ),
    "Embed": (
        partial(nnx.Embed, 5, 3),
        (5, 3),
        "layer.embedding",
        {EMBED_A: (2, 5), EMBED_B: (3, 2)},
        lambda a, b: (b @ a).T,
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapted_layer_computes_with_the_sum_of_the_weights(kind, tmp_path):
    make, shape, line, shapes, product = KINDS[kind]
    weight = numbers(*shape)
    factors = {name: numbers(*shape) for name, shape in shapes.items()}
    merged = weight + 3 * product(*factors.values())
    table = {"x.weight": line}
    abstract = nnx.eval_shape(lambda: nnx.Dict(layer=make(rngs=nnx.Rngs(0))))
    model, expected = [
        nnx.weights.load({"x.weight": x}, nnx.clone(abstract), table)
        for x in (weight, merged)
    ]
    write_adapter(tmp_path, factors)
    assert nnx.weights.load_adapter(tmp_path, model, table) == [("layer",)]
    x = np.arange(5) if kind == "Embed" else numbers(4, 7, 6, 5)
    found, expected = [programs.in_one_program(m.layer, x) for m in (model, expected)]
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)
    file = tmp_path / "adapter_model.safetensors"
    before = file.read_bytes()
    nnx.weights.save_adapter(tmp_path, model, table)
    assert file.read_bytes() == before


EMBED_TABLE = {"x": "layer"}


def adapted_embed(folder, *, base=None, held=None):
    held = numbers(5, 3) if held is None else held
    factors = {EMBED_A: numbers(2, 5), EMBED_B: numbers(3, 2)}
    if base is not None:
        factors["x.base_layer.weight"] = base
    write_adapter(folder, factors)
    model = nnx.Dict(layer=nnx.Embed(5, 3, rngs=nnx.Rngs(0)))
    nnx.weights.load({"x.weight": held}, model, EMBED_TABLE)
    nnx.weights.load_adapter(folder, model, EMBED_TABLE)
    return model, held


def test_attend_of_an_adapted_embedding_stays_as_peft_has_it(tmp_path):
    model, held = adapted_embed(tmp_path)
    query = numbers(2, 3)
    np.testing.assert_allclose(model.layer.attend(query), query @ held.T, rtol=1e-5)
    with pytest.raises(ValueError, match="adapts_attend = True"):
        nnx.surgery.merge_lora(model)


# A head that PEFT ties to the embedding, with the transposed factors.
TIED = nnx.weights.Mapping(EMBED_TABLE, tied={"head.weight": "x.weight"})
HEAD = "head.lora_A.weight", "head.lora_B.weight", "head.base_layer.weight"


def test_an_embedding_and_its_attend_are_a_tied_head_in_peft(tmp_path):
    model = nnx.Dict(layer=nnx.Embed(5, 3, rngs=nnx.Rngs(0)))
    nnx.surgery.add_lora(model, "layer", rank=2, rngs=nnx.Rngs(1))
    model.layer.lora.lora_b[...] = numbers(2, 3)
    nnx.weights.save_adapter(tmp_path, model, EMBED_TABLE)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["ensure_weight_tying"] is True
    other = nnx.Dict(layer=nnx.Embed(5, 3, rngs=nnx.Rngs(0)))
    nnx.weights.load_adapter(tmp_path, other, EMBED_TABLE)
    assert nnx.graphdef(other) == nnx.graphdef(model)
    query = numbers(2, 3)
    found, expected = [m.layer.attend(query) for m in (other, model)]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("wrong", [None, *HEAD])
def test_factors_of_a_tied_head_must_be_those_of_the_embedding(wrong, tmp_path):
    a, b, held = numbers(2, 5), numbers(3, 2), numbers(5, 3)
    factors = {EMBED_A: a, EMBED_B: b, **dict(zip(HEAD, (b.T, a.T, held), strict=True))}
    if wrong is not None:
        factors[wrong] = factors[wrong] + 1
    write_adapter(tmp_path, factors, ensure_weight_tying=True)
    model = nnx.Dict(layer=nnx.Embed(5, 3, rngs=nnx.Rngs(0)))
    nnx.weights.load({"x.weight": held}, model, EMBED_TABLE)
    check_refused(tmp_path, model, EMBED_TABLE, "head.lora_A")
    if wrong is not None:
        return check_refused(tmp_path, model, TIED, "tied head|contains a weight for")
    nnx.weights.load_adapter(tmp_path, model, TIED)
    query = numbers(2, 3)
    # By the formula: the rows with their change, 6 / 2 times the product.
    table = held + 3 * (b @ a).T
    expected = query @ table.T
    return np.testing.assert_allclose(model.layer.attend(query), expected, rtol=1e-4)


def test_embeddings_are_all_tied_or_none(tmp_path):
    rngs = nnx.Rngs(0)
    model = nnx.Dict(a=nnx.Embed(5, 3, rngs=rngs), b=nnx.Embed(5, 3, rngs=rngs))
    nnx.surgery.add_lora(model, nnx.Embed, rank=2, rngs=rngs)
    model.b.lora.adapts_attend = False
    with raises(ValueError, "of all embeddings, or of none", "a: True", "b: False"):
        nnx.weights.save_adapter(tmp_path, model, {"a": "a", "b": "b"})
    assert not any(tmp_path.iterdir())


class Experts(nnx.Module):
    """Two arrays of matrices and a matrix; PEFT calls them target_parameters."""

    def __init__(self):
        self.up = nnx.Param(jnp.zeros((2, 3, 3)))
        self.down = nnx.Param(jnp.zeros((2, 3, 5)))
        self.mix = nnx.Param(jnp.zeros((5, 4)))


# The order is that of PyTorch's module, whose last parameter is outermost.
EXPERTS = {
    "h.up": ("experts.up", "e o i -> e i o"),
    "h.down": ("experts.down", "e i o -> e i o"),
    "h.mix": ("experts.mix", "o i -> i o"),
}
TARGETS = {"target_parameters": ["h.down", "up", "h.mix"], "target_modules": []}


def experts_factors(rank=2):
    """Those of the parameters ``up``, ``down`` and ``mix``, as PEFT 0.21 names them."""
    shapes = {
        "h.base_layer.base_layer": (2 * rank, 3, 3, 2 * rank),
        "h.base_layer": (2 * rank, 3, 5, 2 * rank),
        "h": (rank, 5, 4, rank),
    }
    return {
        f"{name}.lora_{letter}.weight": numbers(*shape)
        for name, sizes in shapes.items()
        for letter, shape in (("A", sizes[:2]), ("B", sizes[2:]))
    }


def test_target_parameters_count_as_in_peft(tmp_path):
    factors = experts_factors()
    write_adapter(tmp_path, factors, **TARGETS)
    model = nnx.Dict(experts=Experts())
    paths = nnx.weights.load_adapter(tmp_path, model, EXPERTS)
    assert paths == [("experts", name) for name in ("down", "mix", "up")]
    a, b, c, d, e, f = factors.values()
    # `ParamWrapper.get_delta_weight`: ranks lie within experts in A, outside in B.
    experts = "ore,eri->eio"
    changes = {
        "up": np.einsum(experts, b.reshape(3, 2, 2), a.reshape(2, 2, 3)),
        "down": np.einsum(experts, d.reshape(5, 2, 2), c.reshape(2, 2, 3)),
        "mix": (f @ e).T,
    }
    for name, change in changes.items():
        np.testing.assert_allclose(getattr(model.experts, name), 3 * change, atol=1e-5)
    before = (tmp_path / "adapter_model.safetensors").read_bytes()
    nnx.weights.save_adapter(tmp_path, model, EXPERTS)
    assert (tmp_path / "adapter_model.safetensors").read_bytes() == before
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["target_parameters"] == [*EXPERTS] and not config["target_modules"]
    assert len(nnx.surgery.merge_lora(model)) == 3


def test_ranks_and_scales_of_parameters_have_their_whole_names(tmp_path):
    model = nnx.Dict(experts=Experts())
    nnx.surgery.add_lora(model, "experts.up", rank=3, alpha=4, rngs=nnx.Rngs(0))
    nnx.surgery.add_lora(model, "experts.mix", rank=2, alpha=5, rngs=nnx.Rngs(0))
    nnx.weights.save_adapter(tmp_path, model, EXPERTS)
    other = nnx.Dict(experts=Experts())
    nnx.weights.load_adapter(tmp_path, other, EXPERTS)
    assert nnx.graphdef(other) == nnx.graphdef(model)


@tables.cases(
    "table, told",
    # Nothing says which of two axes of one size meets the inputs.
    ({**EXPERTS, "h.up": "experts.up"}, "h.up.*Name them i and o"),
    # `down` and `up` in the other order.
    ({name: EXPERTS[name] for name in ("h.down", "h.up", "h.mix")}, "order of PyTorch"),
    # One of them is not in the table.
    ({name: EXPERTS[name] for name in ("h.up", "h.mix")}, "base_layer.base_layer"),
)
def test_target_parameters_that_do_not_fit_are_refused(table, told, tmp_path):
    write_adapter(tmp_path, experts_factors(), **TARGETS)
    model = nnx.Dict(experts=Experts())
    check_refused(tmp_path, model, table, f"(?s){told}")


def test_weights_that_peft_saves_beside_factors_must_be_those_of_the_model(tmp_path):
    held = numbers(5, 3)
    adapted_embed(tmp_path, base=held, held=held)
    with pytest.raises(ValueError, match="contains a weight for 'x'"):
        adapted_embed(tmp_path, base=held + 1, held=held)


def test_factors_of_a_weight_fused_along_its_inputs_are_refused(tmp_path):
    table = {"x.weight": (["a.kernel", "b.kernel"], "o +i -> i o")}
    rngs = nnx.Rngs(0)
    model = nnx.Dict(a=nnx.Linear(5, 3, rngs=rngs), b=nnx.Linear(5, 3, rngs=rngs))
    write_adapter(tmp_path, {A: numbers(2, 10), B: numbers(3, 2)})
    check_refused(tmp_path, model, table, "several layers that can't be adapted")


# ------------------------------------------------------------------- layouts of PyTorch


def loaded(make, **weights):
    """A layer with such weights, and none beside them."""
    model = nnx.eval_shape(lambda: nnx.Dict(layer=make(rngs=nnx.Rngs(0))))
    named = {f"x.{name.replace('__', '.')}": value for name, value in weights.items()}
    return nnx.weights.load(named, model, {"x": "layer"}).layer


def check_call(layer, *inputs, expected):
    found = programs.in_one_program(layer, *inputs)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def correlated(x, weight):
    """``torch.nn.functional.conv1d``, with channels last, by its formula."""
    size = weight.shape[2]
    windows = [x[:, t : t + size] for t in range(x.shape[1] - size + 1)]
    return np.stack([np.einsum("nki,oik->no", w, weight) for w in windows], 1)


def correlated_by_halves(x, weight):
    """The same with two groups."""
    halves = [correlated(x[..., [g]], weight[2 * g : 2 * g + 2]) for g in (0, 1)]
    return np.concatenate(halves, -1)


def added(x, weight):
    """Each input adds its multiple of the kernel to the output, stride by stride."""
    expected = np.zeros((len(x), 2 * x.shape[1] + 2, weight.shape[1]))
    for t in range(x.shape[1]):
        part = np.einsum("ni,iok->nko", x[:, t], weight)
        expected[:, 2 * t : 2 * t + weight.shape[2]] += part
    return expected


VALID = {"padding": "VALID", "use_bias": False}
transposed = partial(nnx.ConvTranspose, 2, 3, (4,), strides=2, **VALID)


def normalized(*axes):
    def expected(x, weight, bias):
        mean, variance = x.mean(axes, keepdims=True), x.var(axes, keepdims=True)
        return (x - mean) / np.sqrt(variance + 1e-6) * weight + bias

    return expected


def by_statistics(x, weight, bias, running_mean, running_var):
    return (x - running_mean) / np.sqrt(running_var + 1e-5) * weight + bias


class MyLinear(nnx.Linear):
    """A subclass is stored like its class."""


AFFINE = {"weight": (3,), "bias": (3,)}
STATISTICS = {"running_mean": (3,), "running_var": (3,)}
NORMALIZES = AFFINE, (2, 5, 3)
# A layer, the shapes of its tensors and of an input, and what comes out.
LAYOUTS = {
    "Linear": (
        partial(nnx.Linear, 4, 3),
        {"weight": (3, 4), "bias": (3,)},
        (2, 4),
        lambda x, weight, bias: x @ weight.T + bias,
    ),
    "a subclass": (
        partial(MyLinear, 4, 3, use_bias=False),
        {"weight": (3, 4)},
        (2, 4),
        lambda x, weight: x @ weight.T,
    ),
    "one axis for all outputs": (
        partial(nnx.LinearGeneral, 4, (2, 3)),
        {"weight": (6, 4), "bias": (6,)},
        (2, 4),
        lambda x, weight, bias: (x @ weight.T + bias).reshape(2, 2, 3),
    ),
    "one axis for all inputs": (
        partial(nnx.LinearGeneral, (2, 3), 4, axis=(-2, -1), use_bias=False),
        {"weight": (4, 6)},
        (2, 2, 3),
        lambda x, weight: x.reshape(2, 6) @ weight.T,
    ),
    "Conv": (
        partial(nnx.Conv, 2, 3, (4,), padding="VALID"),
        {"weight": (3, 2, 4), "bias": (3,)},
        (1, 7, 2),
        lambda x, weight, bias: correlated(x, weight) + bias,
    ),
    "Conv in groups": (
        partial(nnx.Conv, 2, 4, (3,), feature_group_count=2, **VALID),
        {"weight": (4, 1, 3)},
        (1, 6, 2),
        correlated_by_halves,
    ),
    "ConvTranspose": (transposed, {"weight": (2, 3, 4)}, (1, 5, 2), added),
    "its kernel transposed": (
        partial(transposed, transpose_kernel=True),
        {"weight": (2, 3, 4)},
        (1, 5, 2),
        added,
    ),
    "LayerNorm": (partial(nnx.LayerNorm, 3), *NORMALIZES, normalized(-1)),
    "GroupNorm": (partial(nnx.GroupNorm, 3, 1), *NORMALIZES, normalized(1, 2)),
    "InstanceNorm": (partial(nnx.InstanceNorm, 3), *NORMALIZES, normalized(1)),
    "RMSNorm": (
        partial(nnx.RMSNorm, 3),
        {"weight": (3,)},
        (2, 3),
        lambda x, weight: x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weight,
    ),
    "BatchNorm": (
        partial(nnx.BatchNorm, 3, use_running_average=True, epsilon=1e-5),
        AFFINE | STATISTICS,
        (4, 3),
        by_statistics,
    ),
    "PReLU": (
        lambda rngs: nnx.PReLU(),
        {"weight": (1,)},
        (4,),
        lambda x, weight: np.where(x < 0, weight * x, x),
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layers_compute_what_they_compute_in_pytorch(name):
    make, shapes, of_input, expected = LAYOUTS[name]
    # Positive, as a variance is.
    weights = {name: abs(numbers(*shape)) for name, shape in shapes.items()}
    x = numbers(*of_input)
    check_call(loaded(make, **weights), x, expected=expected(x, **weights))


# ------------------------------------------------------------------------- attention


def attended(q, k, v):
    """One head, by the formula."""
    scores = np.exp(q @ k.T / np.sqrt(q.shape[1]))
    return scores / scores.sum(-1, keepdims=True) @ v


def test_multi_head_attention():
    """``torch.nn.MultiheadAttention``, by the formulas of its documentation."""
    x, w, b = numbers(5, 6), numbers(18, 6), numbers(18)
    out, shift = numbers(6, 6), numbers(6)
    weights = {"in_proj_weight": w, "in_proj_bias": b}
    weights |= {"out_proj__weight": out, "out_proj__bias": shift}
    layer = loaded(partial(nnx.MultiHeadAttention, 2, 6, decode=False), **weights)
    q, k, v = np.split(x @ w.T + b, 3, axis=1)
    heads = [attended(*(y[:, h : h + 3] for y in (q, k, v))) for h in (0, 3)]
    check_call(layer, x, expected=np.concatenate(heads, 1) @ out.T + shift)


def test_attention_to_inputs_of_another_size_has_a_tensor_for_each():
    make = partial(nnx.MultiHeadAttention, 1, 4, in_kv_features=3, decode=False)
    weights = {
        "q_proj_weight": numbers(4, 4),
        "k_proj_weight": numbers(4, 3),
        "v_proj_weight": numbers(4, 3),
        "in_proj_bias": numbers(12),
        "out_proj__weight": numbers(4, 4),
        "out_proj__bias": numbers(4),
    }
    layer = loaded(make, **weights)
    x, y = numbers(2, 4), numbers(5, 3)
    q, k, v, b, w, out = weights.values()
    heads = attended(x @ q.T + b[:4], y @ k.T + b[4:8], y @ v.T + b[8:])
    check_call(layer, x, y, expected=heads @ w.T + out)


# ----------------------------------------------------------------------------- cells


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


CELL = {
    f"{name}_{a}h_l0": f"cell.dense_{a}.{key}"
    for a in "ih"
    for name, key in (("weight", "kernel"), ("bias", "bias"))
}


def filled_cell(cls, gates, other):
    """A cell with two biases: PyTorch has one for inputs and one for the state."""

    def make():
        cell = cls(2, 3, rngs=nnx.Rngs(0))
        shape = getattr(cell, other).kernel.shape
        setattr(cell, other, nnx.Linear(*shape, rngs=nnx.Rngs(0)))
        return nnx.Dict(cell=cell)

    size = gates * 3
    weights = numbers(size, 2), numbers(size), numbers(size, 3), numbers(size)
    named = dict(zip(CELL, weights, strict=True))
    return nnx.weights.load(named, nnx.eval_shape(make), CELL).cell, weights


def test_lstm_with_both_biases():
    cell, (w, b, u, d) = filled_cell(nnx.OptimizedLSTMCell, 4, "dense_i")
    x, c, h = numbers(4, 2), numbers(4, 3), numbers(4, 3)
    i, f, g, o = np.split(x @ w.T + b + h @ u.T + d, 4, axis=-1)
    c_next = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
    (_, y), _ = programs.in_one_program(cell, (c, h), x)
    np.testing.assert_allclose(y, sigmoid(o) * np.tanh(c_next), rtol=1e-4, atol=1e-5)


def test_gru_with_both_biases():
    cell, (w, b, u, d) = filled_cell(nnx.GRUCell, 3, "dense_h")
    x, h = numbers(4, 2), numbers(4, 3)
    (r, z, n), (s, t, m) = [np.split(y, 3, axis=-1) for y in (x @ w.T + b, h @ u.T + d)]
    r, z = sigmoid(r + s), sigmoid(z + t)
    expected = (1 - z) * np.tanh(n + r * m) + z * h
    found = programs.in_one_program(cell, h, x)[0]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
