"""The benchmarks run, and what they time is what they say; no test looks at a time."""

import jax
import pytest

from benchmarks import __main__ as program
from benchmarks import rows, timing


def step_rows():
    return [*rows.groups()[0].rows, *rows._in_place(4)]


@pytest.mark.parametrize("row", step_rows(), ids=lambda r: f"{r.library} {r.variant}")
def test_every_timed_train_step_lowers_the_loss(row):
    step = row.set_up()
    losses = [float(step()) for _ in range(5)]
    assert losses == sorted(losses, reverse=True) and losses[0] > losses[-1]


def test_operations_take_turns():
    order = []
    timing.medians(
        [lambda: order.append("a"), lambda: order.append("b")], rounds=3, seconds=0
    )
    warm_up = 16
    assert order[warm_up:] == ["a", "b"] * 3


def test_table_compares_with_raw_jax_and_with_flax_in_the_same_mode():
    group = rows.Group(
        "call",
        (
            rows.Row(rows.RAW, "", jax.devices),
            rows.Row("Graftree", "", jax.devices),
            rows.Row(rows.FLAX, "", jax.devices),
        ),
    )
    lines = program._table(group, [1e-6, 2e-6, 8e-6]).splitlines()
    assert lines[-2].split() == ["Graftree", "2.0", "2.00", "0.25"]
    assert lines[-1].split() == ["Flax", "NNX", "8.0", "8.00"]


def test_program_prints_the_groups_asked_for(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["benchmarks", "--quick", "--only", "merge"])
    program.main()
    titles = [row for row in capsys.readouterr().out.splitlines() if "/ raw" in row]
    assert [title.split(",")[0] for title in titles] == ["merge"]
