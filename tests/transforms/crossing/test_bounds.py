"""Internals: what is remembered is bounded, and is right after a race.

That the least recent of very many is forgotten can't be seen from outside in a small
test, nor can a thread be stopped between two steps of a call.
"""

import jax.numpy as jnp

import graftree as nnx
from graftree.core.graph import watches
from graftree.core.graph.watches import Together
from graftree.transforms.crossing import programs
from tests import zoo
from tests.modes import TREE
from tests.static_values import Tag


def remembered(step):
    """How many combinations of objects a function knows, and the variants of each."""
    known = step._plans._known._known.values()
    return [len(memos["plans"]) for memos, _ in known]


def test_variants_of_a_model_are_bounded(mode):
    step, model = nnx.jit(lambda model: model.w * model.k, **mode), zoo.Scale()
    for model.k in range(watches.VARIANTS + 4):
        assert step(model) == step(model) == 2 * model.k
    assert remembered(step) == [watches.VARIANTS]


def test_models_of_a_function_are_bounded():
    step = nnx.jit(lambda model: model.w * 1)
    models = [zoo.Scale() for _ in range(Together.LIMIT + 3)]
    for _ in range(3):
        for model in models:
            assert step(model) == 2
    assert len(remembered(step)) == Together.LIMIT


def test_structures_of_new_objects_are_bounded():
    step = nnx.jit(lambda model: model.w * 1, **TREE)
    for number in range(Together.LIMIT + 3):
        for _ in range(2):
            assert step(zoo.Box(w=nnx.Param(jnp.array(2.0)), tag=Tag(number))) == 2
    assert len(step._plans._of_trees) <= Together.LIMIT


def test_programs_of_control_flow_are_bounded(monkeypatch):
    monkeypatch.setattr(programs, "MOST", 4)
    known = {}
    monkeypatch.setattr(programs, "_known", known)
    for number in range(12):
        often = nnx.cond(True, lambda x: x + 99.0, lambda x: x, 1.0)
        once = nnx.cond(True, lambda x, n=number: x + n, lambda x: x, 1.0)
        assert (often, once) == (100.0, 1.0 + number)
    assert len(known) == 4


def test_a_call_survives_a_change_by_another_thread_before_it_is_planned(monkeypatch):
    model = nnx.Dict(weight=jnp.array(2.0), extra=nnx.Dict(array=jnp.array(1.0)))
    double = nnx.jit(lambda model: model.weight * 2)
    double(model)
    attribute_at = watches.attribute_at

    def interrupted(root, path):
        if hasattr(model, "extra"):
            del model.extra
        return attribute_at(root, path)

    monkeypatch.setattr(watches, "attribute_at", interrupted)
    assert double(model) == 4  # the second call makes a plan
    monkeypatch.undo()
    model.weight = jnp.array(3.0)
    assert double(model) == double(model) == 6
