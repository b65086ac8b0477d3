"""Drafts: the lines that shapes and names suggest, and what is left open."""

import numpy as np
import pytest

import graftree as nnx
from examples.models import llama
from tests import tables
from tests.tiny_llamas import CONFIG


def test_the_table_of_llama_is_found():
    model = nnx.eval_shape(lambda: llama.Llama(CONFIG, rngs=nnx.Rngs(0)))
    tensors = nnx.weights.Mapping(llama.WEIGHTS).tensors(model)
    weights = {t.name: np.zeros(t.solved.file_shape, np.float32) for t in tensors}
    draft = nnx.weights.draft(weights, model)
    assert dict(draft.entries) == llama.WEIGHTS and not draft.names
    assert not draft.paths
    table = eval(str(draft), {"nnx": nnx})  # what it prints is the table
    nnx.weights.load(weights, model, table)


@pytest.mark.parametrize("stacked", [False, True])
def test_blocks_are_one_line_in_a_list_and_in_a_stack(stacked):
    def make(rngs):
        return nnx.Linear(2, 3, rngs=rngs)

    rngs = nnx.Rngs(0)
    layers = [make(rngs) for _ in range(2)]
    blocks = nnx.Stack(make, 2, rngs=rngs) if stacked else nnx.List(layers)
    weights = {f"h.{i}.weight": np.zeros((3, 2)) for i in range(2)}
    weights |= {f"h.{i}.bias": np.zeros(3) for i in range(2)}
    draft = nnx.weights.draft(weights, nnx.Dict(blocks=blocks))
    assert dict(draft.entries) == {"h.{i}": "blocks[{i}]"}


def test_what_has_no_counterpart_is_listed():
    model = nnx.Dict(a=nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    draft = nnx.weights.draft({"b.weight": np.zeros((9, 9))}, model)
    assert not draft.entries and draft.names == {"b.weight": (9, 9)}
    assert draft.paths == {"a.bias": (3,), "a.weight": (3, 2)}
    assert "# in the file: 'b.weight' [9, 9]" in str(draft)


def test_equal_shapes_and_names_are_doubtful():
    def layer():
        return nnx.Linear(2, 2, use_bias=False, rngs=nnx.Rngs(0))

    model = nnx.Dict(one=layer(), two=layer())
    weights = {"x.weight": np.zeros((2, 2)), "y.weight": np.zeros((2, 2))}
    draft = nnx.weights.draft(weights, model)
    assert {*draft.entries} == {"x", "y"}
    assert draft.doubtful
    assert "# or " in str(draft)


def test_attention_is_what_the_file_has():
    layer = nnx.MultiHeadAttention(2, 6, use_bias=False, decode=False, rngs=nnx.Rngs(0))
    model = nnx.Dict(attention=layer)
    fused = {"attn.in_proj_weight": np.zeros((18, 6))}
    fused["attn.out_proj.weight"] = np.zeros((6, 6))
    assert {*nnx.weights.draft(fused, model).names} == {*fused}
    names = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "out"}
    weights = {f"attn.{name}.weight": np.zeros((6, 6)) for name in names}
    draft = nnx.weights.draft(weights, model)
    assert dict(draft.entries) == {
        f"attn.{name}": f"attention.{path}" for name, path in names.items()
    }


@tables.cases("name", "layers.{i}.self_attn.qkv_proj", "h.{i}.qkv", "h.{i}.attn.c_attn")
def test_attention_is_not_taken_for_an_mlp_of_its_shape(name):
    def block():
        up = nnx.Linear(2, 6, use_bias=False, rngs=nnx.Rngs(0))
        return nnx.Dict(mlp=nnx.Dict(up=up))

    model = nnx.Dict(blocks=nnx.List([block(), block()]))
    weights = {f"{name.format(i=i)}.weight": np.zeros((6, 2)) for i in range(2)}
    draft = nnx.weights.draft(weights, model)
    assert not draft.entries
    assert {*draft.names} == {f"{name}.weight"}
    assert {*draft.paths} == {"blocks[{i}].mlp.up.weight"}
