"""The programs of docs/look_up/issues.md on this package: what they print."""

import ast
import gc
import runpy
import sys
import types

import pytest

import graftree as nnx
from benchmarks.issues import figures
from tests import sources
from website import pages

COSTS = pytest.mark.caches("it counts what repeated calls cost")


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs a program of the gallery in this process, and gives its figures."""
    flax = types.ModuleType("flax")
    flax.nnx = nnx
    monkeypatch.setitem(sys.modules, "flax", flax)

    def run(program):
        runpy.run_path(str(figures.FOLDER / f"{program}.py"))
        return figures.read(capsys.readouterr().out)

    return run


PAGE = sources.ROOT / "docs" / "look_up" / "issues.md"


@pytest.fixture
def default_collector():
    """Lets the garbage collector run as often as it does in a program."""
    thresholds = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*thresholds)


def number(figure):
    """The number in a figure, without its unit."""
    return float(figure.split()[0])


@COSTS
def test_a_compiled_call_runs_the_same_python_for_any_number_of_layers(run):
    found = run("decoding")
    few, many = [found[f"nnx.jit of {n} layers, Python calls"] for n in (10, 50)]
    assert number(few) == number(many) < 50


def test_a_scan_over_layers_copies_no_parameters(run):
    found = run("scan_memory")
    assert len(found) == 2
    assert all(number(figure) < 0.5 for figure in found.values())


def test_dropout_after_merge_is_differentiated_or_an_error_that_names_the_way_out(run):
    shared, named, difference = run("merge_dropout").values()
    assert (shared, named, number(difference)) == ("TraceContextError", "True", 0)


def test_a_traced_write_costs_the_same_after_many_others(run):
    found = run("tracing")
    few, many = [found[f"{n} writes, Python calls per write"] for n in (100, 800)]
    assert number(many) <= number(few)


@COSTS
def test_train_steps_do_not_run_the_garbage_collector(run, default_collector):
    assert number(run("slow_step")["runs of the collector in 300 steps"]) < 10


@COSTS
def test_control_flow_outside_jit_is_compiled_once(run):
    found = run("eager_control_flow")
    assert found["10 more calls of cond, compilations"] == "0"
    assert found["10 more calls of fori_loop, compilations"] == "0"


def test_new_models_share_a_trace_if_their_optax_optimizer_is_one(run):
    assert run("new_optimizers")["5 epochs with one adam, traces"] == "1"


def test_restored_layers_come_back_to_their_places(run):
    assert [*run("restored_layers").values()] == ["12", "12"]


def test_no_key_is_drawn_twice(run):
    assert run("repeated_keys") == {"of 3 keys, drawn a second time": "0"}


def test_an_rnn_may_be_closed_over_by_jit(run):
    (difference,) = run("closed_over_rnn").values()
    assert number(difference) < 1e-6


# ----------------------------------------------------------------- the page, the runner


def test_page_and_table_have_the_same_programs():
    programs = {path.stem for path in figures.FOLDER.glob("*.py")}
    assert {"__init__", "__main__", "figures", *figures.PROGRAMS} == programs


def test_what_the_page_defines_stands_in_the_programs():
    programs = [(figures.FOLDER / f"{x}.py").read_text() for x in figures.PROGRAMS]
    known = {ast.dump(part) for text in programs for part in ast.parse(text).body}
    free = (ast.Expr, ast.Import, ast.For, ast.Try)
    unknown = [
        ast.unparse(part)
        for block in pages.read(PAGE).blocks
        for part in ast.parse(block.code).body
        if not isinstance(part, free) and ast.dump(part) not in known
    ]
    assert unknown == [
        "plan = jax.jit(repeat).lower(state, x).compile().memory_analysis()",
        "before = len(events)",
    ]


def test_a_program_that_fails_gives_the_name_of_the_error(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "FOLDER", tmp_path)
    (tmp_path / "broken.py").write_text("print('made: 1')\nraise KeyError('x')")
    assert figures.measure("broken") == {"made": "1", "error": "KeyError"}
