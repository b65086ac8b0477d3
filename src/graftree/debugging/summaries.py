"""Summaries of models as tables: calls, shapes, Variables, sizes, operations.

`module_calls` and `outlines` find the contents of a table. Rich draws it; it is
optional and imported only then.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from graftree.core import paths
from graftree.core.graph import nodes
from graftree.core.modules import capturing
from graftree.core.modules.containers import Dict, List
from graftree.core.rng.streams import RngState
from graftree.core.states.states import State
from graftree.core.text import descriptions, representations, writing
from graftree.core.variables.kinds import Param
from graftree.core.variables.metadata import FROZEN_TYPE
from graftree.core.variables.variables import Variable
from graftree.debugging import module_calls, outlines
from graftree.debugging.module_calls import CallInfo, Counter
from graftree.surgery.frozen_variables import Frozen

_NONE: Mapping[str, Any] = {}

_NOTEBOOK_WIDTH = 115  # that of rich, in columns


def tabulate(
    obj: Any,
    *input_args: Any,
    depth: int | None = None,
    method: str = "__call__",
    row_filter: Callable[[CallInfo], bool] = module_calls.filter_rng_streams,
    table_kwargs: Mapping[str, Any] = _NONE,
    column_kwargs: Mapping[str, Any] = _NONE,
    console_kwargs: Mapping[str, Any] = _NONE,
    compute_flops: bool = False,
    compute_vjp_flops: bool = False,
    **input_kwargs: Any,
) -> str:
    """Summarizes a model in a table of the calls that it makes for some inputs.

    A row is a call of ``__call__`` or another public method of an object in the model:
    its path, class, inputs, outputs and Variables, with the sizes of all Variables in
    the object. Repeated calls for inputs of the same shapes get no separate row.
    Nothing is computed, and the model stays as it is.

    Without inputs, a model that needs some is listed part by part: paths, classes (of
    functions in a list, such as ``nnx.relu`` in a `Sequential`, names) and Variables.
    Parts that differ only in an index are one row, such as ``blocks/0-11``, with the
    sizes of each.

    The total of a table of calls counts every Variable, also keys and counts of random
    streams; without calls these are left out. A second line says how much is trainable
    (Params) and how much is frozen (`surgery.freeze`), if anything is, and always where
    calls are not listed.

    Args:
        obj: The model: a Module or another graph node. Its arrays, and those of the
            inputs, may be ``jax.ShapeDtypeStruct``. A container that can't be called
            is listed without calls.
        *input_args: The positional arguments of the call.
        depth: How long the paths of rows may be; ``None``: any length.
        method: The name of the method to call.
        row_filter: Which calls become rows, or which parts where calls are not listed.
            The default leaves out draws of keys.
        table_kwargs: For ``rich.table.Table``.
        column_kwargs: For ``rich.table.Table.add_column``.
        console_kwargs: For ``rich.console.Console``, such as ``width``.
        compute_flops: Whether to add the floating-point operations of each call, as
            XLA counts them before it optimizes. The body of a loop counts once.
        compute_vjp_flops: Whether to add those of each call and its derivative.
        **input_kwargs: The keyword arguments of the call.

    Returns:
        The table as text, with the control codes of terminals unless
        ``console_kwargs={"force_terminal": False}``.

    Raises:
        ValueError: If ``obj`` is not a graph node.
        KeyError: If it has no such method; lists those that it has.
        ImportError: If rich is not installed.

    Example:
        >>> model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.relu)
        >>> plain = {"width": 80, "force_terminal": False}
        >>> print(nnx.tabulate(model, jnp.ones((1, 2)), console_kwargs=plain))
                                   Sequential Summary
        ┏━━━━━━━━━━┳━━━━━━━━━━━━┳━━━━━━━━━━━━━━┳━━━━━━━━━━━━━━┳━━━━━━━━━━━━━━━━━━━━━━┓
        ┃ path     ┃ type       ┃ inputs       ┃ outputs      ┃ Param                ┃
        ┡━━━━━━━━━━╇━━━━━━━━━━━━╇━━━━━━━━━━━━━━╇━━━━━━━━━━━━━━╇━━━━━━━━━━━━━━━━━━━━━━┩
        │          │ Sequential │ float32[1,2] │ float32[1,3] │ 9 (36 B)             │
        ├──────────┼────────────┼──────────────┼──────────────┼──────────────────────┤
        │ layers/0 │ Linear     │ float32[1,2] │ float32[1,3] │ bias: float32[3]     │
        │          │            │              │              │ kernel: float32[2,3] │
        │          │            │              │              │                      │
        │          │            │              │              │ 9 (36 B)             │
        ├──────────┼────────────┼──────────────┼──────────────┼──────────────────────┤
        │          │            │              │        Total │ 9 (36 B)             │
        └──────────┴────────────┴──────────────┴──────────────┴──────────────────────┘
        <BLANKLINE>
                              Total Parameters: 9 (36 B)
        >>> blocks = nnx.List(nnx.Linear(4, 4, rngs=nnx.Rngs(i)) for i in range(6))
        >>> model = nnx.Sequential(*blocks)
        >>> frozen = nnx.surgery.freeze(model, where="layers[:4]")
        >>> print(nnx.tabulate(model, console_kwargs=plain))
                                   Sequential Summary
        ┏━━━━━━━━━━━━┳━━━━━━━━━━━━┳━━━━━━━━━━━━━━━━━━━━━━┳━━━━━━━━━━━━━━━━━━━━━━┓
        ┃ path       ┃ type       ┃ Frozen               ┃ Param                ┃
        ┡━━━━━━━━━━━━╇━━━━━━━━━━━━╇━━━━━━━━━━━━━━━━━━━━━━╇━━━━━━━━━━━━━━━━━━━━━━┩
        │            │ Sequential │ 80 (320 B)           │ 40 (160 B)           │
        ├────────────┼────────────┼──────────────────────┼──────────────────────┤
        │ layers     │ List       │ 80 (320 B)           │ 40 (160 B)           │
        ├────────────┼────────────┼──────────────────────┼──────────────────────┤
        │ layers/0-3 │ 4 x Linear │ bias: float32[4]     │                      │
        │            │            │ kernel: float32[4,4] │                      │
        │            │            │                      │                      │
        │            │            │ 20 (80 B) each       │                      │
        ├────────────┼────────────┼──────────────────────┼──────────────────────┤
        │ layers/4-5 │ 2 x Linear │                      │ bias: float32[4]     │
        │            │            │                      │ kernel: float32[4,4] │
        │            │            │                      │                      │
        │            │            │                      │ 20 (80 B) each       │
        ├────────────┼────────────┼──────────────────────┼──────────────────────┤
        │            │      Total │ 80 (320 B)           │ 40 (160 B)           │
        └────────────┴────────────┴──────────────────────┴──────────────────────┘
        <BLANKLINE>
                              Total Parameters: 120 (480 B)
                        Trainable: 40 (160 B), Frozen: 80 (320 B)
    """
    rich = _rich()
    _check(obj, method, bool(input_args or input_kwargs))
    infos = outlines.of_all(obj)
    counter = Counter(compute_flops, compute_vjp_flops)
    calls = _calls(obj, method, input_args, input_kwargs, counter)
    shown = [
        (call, infos[call.object_id])
        for call in (_uncalled(obj) if calls is None else calls)
        if (depth is None or len(call.path) <= depth) and row_filter(call)
    ]
    columns = [] if calls is None else ["inputs", "outputs", *counter.asked]
    drawing = _Drawing(rich, columns, infos[id(obj)].stats, column_kwargs)
    rows = [drawing.cells(*pair) for pair in shown]
    rows = _folded(shown, rows) if calls is None else rows
    title = f"{type(obj).__name__} Summary"
    return _print(rich, drawing.table(rows, title, table_kwargs), console_kwargs)


def _check(obj: Any, method: str, has_inputs: bool) -> None:
    if not (nodes.is_graph_node(obj) or isinstance(obj, _CONTAINERS)):
        raise ValueError(
            f"Expected a graph node, got {type(obj).__name__}: tabulate takes a Module "
            "or another Pytree, or a container of them."
        )
    is_call = method == "__call__"
    is_listed = is_call and isinstance(obj, _CONTAINERS) and not has_inputs
    if not is_listed and not callable(getattr(obj, method, None)):
        methods = ", ".join(sorted(capturing.method_names(type(obj)))) or "none"
        hint = ": name one in tabulate(..., method=...)" if is_call else ""
        name = type(obj).__name__
        raise KeyError(
            f"{name} has no method {method!r}{hint}. Its methods: {methods}."
        )


_CONTAINERS = (List, Dict, State, list, tuple, dict)


def _calls(
    obj: Any,
    method: str,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    counter: Counter,
) -> list[CallInfo] | None:
    """Records the calls for some inputs; ``None`` if needed inputs are not there.

    Needed inputs count only if neither a method nor costs are asked for.
    """
    if not hasattr(obj, method):
        return None
    is_plain = not (args or kwargs or counter.asked) and method == "__call__"
    parameters = _parameters(obj) if is_plain else []
    takes_any = inspect.Parameter.VAR_POSITIONAL
    further = (takes_any, inspect.Parameter.VAR_KEYWORD)
    if any(p.default is p.empty and p.kind not in further for p in parameters):
        return None
    try:
        return module_calls.record(obj, method, args, kwargs, counter)
    except TypeError:
        # The signature of a Sequential doesn't say that its first layer needs inputs.
        if any(p.kind is takes_any for p in parameters):
            return None
        raise


def _parameters(obj: Any) -> list[inspect.Parameter]:
    try:
        return [*inspect.signature(obj).parameters.values()]
    except (TypeError, ValueError):  # it is not written in Python
        return []


def _uncalled(obj: Any) -> list[CallInfo]:
    """Lists each object in a model, and each function in a list, as if called."""
    return [
        CallInfo(order, id(x), type(x), path, "", None)
        for order, (path, x) in enumerate(outlines.first_paths(obj))
    ]


def _folded(
    shown: Sequence[tuple[CallInfo, outlines.ObjectInfo]], rows: Sequence[Sequence[str]]
) -> list[list[str]]:
    """Folds rows that differ only in indices, as in ``blocks/0-11/up``."""
    named = [
        ("/".join(f"[{k}]" if type(k) is int else str(k) for k in call.path), *cells)
        for (call, _), (_, *cells) in zip(shown, rows, strict=True)
    ]
    folded = []
    for (path, type_name, *sizes), numbers in descriptions.groups_of_rows(named):
        if len(numbers) > 1:
            type_name = f"{len(numbers)} x {type_name}"
            sizes = [size and f"{size} each" for size in sizes]
        folded.append([outlines.escape(_RANGE.sub(r"\1", path)), type_name, *sizes])
    return folded


_RANGE = re.compile(r"(?:(?<=/)|^)\[([\d*-]+)\](?=/|$)")


def _rich() -> Any:
    try:
        import rich.console
        import rich.table
        import rich.text
    except ImportError as error:
        raise ImportError(
            "nnx.tabulate draws its table with rich, which is not installed: "
            "pip install rich"
        ) from error
    return rich


def _print(rich: Any, table: Any, options: Mapping[str, Any]) -> str:
    # For rich a notebook is a place to draw at once, and it would draw nothing there.
    defaults: dict[str, Any] = {"force_terminal": True, "force_jupyter": False}
    if writing.in_ipython():
        defaults["width"] = _NOTEBOOK_WIDTH
    console = rich.console.Console(**{**defaults, **options})
    with console.capture() as captured:
        console.print(table)
    return captured.get()


@dataclasses.dataclass(frozen=True)
class _Drawing:
    """Draws calls and the contents of their objects.

    Args:
        rich: The package.
        columns: The names of the columns of calls.
        totals: The sizes of all Variables by type, a column for each.
        column_options: For each column.
    """

    rich: Any
    columns: Sequence[str]
    totals: Mapping[type, representations.Size]
    column_options: Mapping[str, Any]

    @property
    def _types(self) -> list[type]:
        return sorted(self.totals, key=lambda variable_type: variable_type.__name__)

    def table(
        self, rows: Sequence[Sequence[str]], title: str, options: Mapping[str, Any]
    ) -> Any:
        defaults = {
            "show_header": True,
            "show_lines": True,
            "show_footer": True,
            "title": title,
            "caption": f"\n{self._caption()}",
            "caption_style": "bold",
        }
        table = self.rich.table.Table(**{**defaults, **options})
        names = ["path", "type", *self.columns]
        for name in names[:-1]:
            table.add_column(name, **self.column_options)
        last = {"footer": self.rich.text.Text("Total", justify="right")}
        table.add_column(names[-1], **{**last, **self.column_options})
        for variable_type in self._types:
            footer = {"footer": self._text(_total(self.totals[variable_type]))}
            table.add_column(
                variable_type.__name__, **{**footer, **self.column_options}
            )
        for cells in rows:
            table.add_row(*map(self._text, cells))
        return table

    def _caption(self) -> str:
        """Writes the total, and its parts."""
        groups = {"Trainable": Param, "Frozen": Frozen, "Random": RngState}
        groups["Other"] = Variable
        sizes = dict.fromkeys(groups, representations.Size(0, 0))
        for variable_type, size in self.totals.items():
            name = next(
                name for name, type in groups.items() if issubclass(variable_type, type)
            )
            sizes[name] = representations.total([sizes[name], size])
        if not self.columns:
            del sizes["Random"]  # no parameters; a table of calls counts them, as Flax
        lines = f"Total Parameters: {_total(representations.total(sizes.values()))}"
        if sizes["Frozen"].elements or not self.columns:
            shown = [f"{name}: {_total(x)}" for name, x in sizes.items() if x.elements]
            lines += f"\n{', '.join(shown)}"
        return lines

    def cells(self, call: CallInfo, info: outlines.ObjectInfo) -> list[str]:
        """Writes the cells of a row."""
        costs = {"flops": str(call.flops), "vjp_flops": str(call.vjp_flops)}
        outputs = outlines.write(call.outputs)
        texts = {"inputs": call.inputs_repr, "outputs": outputs, **costs}
        return [
            outlines.escape(paths.to_string(call.path)),
            outlines.escape(info.name),
            *[texts[name] for name in self.columns],
            *[_cell(info, variable_type) for variable_type in self._types],
        ]

    def _text(self, markup: str) -> Any:
        return self.rich.text.Text.from_markup(markup, emoji=False)


def _cell(info: outlines.ObjectInfo, variable_type: type) -> str:
    paragraphs = []
    variables = info.variable_groups.get(variable_type, {})
    if variables:
        outline = {str(name): _outline(x) for name, x in variables.items()}
        paragraphs.append(outlines.write(outline))
    if variable_type in info.stats:
        paragraphs.append(f"[bold]{_total(info.stats[variable_type])}[/bold]")
    return "\n\n".join(paragraphs)


def _outline(variable: Variable) -> Any:
    """Outlines the value of a Variable, among any metadata of its own."""
    metadata = variable.get_metadata(exclude_required=True)
    if isinstance(variable, Frozen):
        was = metadata.pop(FROZEN_TYPE)
        metadata |= {} if was is Param else {FROZEN_TYPE: was.__name__}
    value = outlines.outline(variable.get_raw_value())
    outlined = {
        name: outlines.outline(x) for name, x in metadata.items() if x is not None
    }
    return {**outlined, "value": value} if outlined else value


def _total(size: representations.Size) -> str:
    return f"{size.elements:,} [dim]({representations.format_bytes(size.bytes)})[/dim]"
