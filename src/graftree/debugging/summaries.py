"""Summaries of models as tables: calls, shapes, Variables, sizes, operations.

What is in it is found by `module_calls` and `outlines`. It is drawn by rich, which is
optional and is imported only then.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from graftree.core import paths
from graftree.core.graph import nodes
from graftree.core.modules.containers import Dict, List
from graftree.core.objects import methods
from graftree.core.states.states import State
from graftree.core.text import representations, writing
from graftree.core.text.representations import Size
from graftree.core.variables.variables import Variable
from graftree.debugging import module_calls, outlines
from graftree.debugging.module_calls import CallInfo, Counter
from graftree.debugging.outlines import ObjectInfo

_NONE: Mapping[str, Any] = MappingProxyType({})

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
    its path, class, inputs, outputs and Variables, with the sizes of all that are in
    the object. Calls that an object makes again for inputs of the same shapes have no
    row of their own. Nothing is computed, and the model stays as it is.

    Args:
        obj: The model: a Module or another graph node. Its arrays, and those of the
            inputs, may be ``jax.ShapeDtypeStruct``. A container that can't be called
            is listed without calls.
        *input_args: The positional arguments of the call.
        depth: How long the paths of rows may be, ``None`` for any length.
        method: The name of the method to call.
        row_filter: Which calls become rows. The default leaves out draws of keys.
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
        ValueError: If ``obj`` is no graph node.
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
    """
    rich = _rich()
    _check(obj, method, bool(input_args or input_kwargs))
    infos = outlines.of_all(obj)
    counter = Counter(compute_flops, compute_vjp_flops)
    if hasattr(obj, method):
        found = module_calls.record(obj, method, input_args, input_kwargs, counter)
    else:
        found = _uncalled(obj)
    kept = [
        call
        for call in found
        if (depth is None or len(call.path) <= depth) and row_filter(call)
    ]
    title = f"{type(obj).__name__} Summary"
    table = _Drawing(rich, counter.asked, infos[id(obj)].stats, column_kwargs).table(
        [(call, infos[call.object_id]) for call in kept], title, table_kwargs
    )
    return _print(rich, table, console_kwargs)


def _check(obj: Any, method: str, has_inputs: bool) -> None:
    if not (nodes.is_graph_node(obj) or isinstance(obj, _CONTAINERS)):
        raise ValueError(
            f"Expected a graph node, got {type(obj).__name__}: tabulate takes a Module "
            "or another Pytree, or a container of them."
        )
    if callable(getattr(obj, method, None)):
        return
    name, known = type(obj).__name__, ", ".join(_methods(obj)) or "none"
    if method != "__call__":
        raise KeyError(f"{name} has no method {method!r}. Its methods: {known}.")
    if has_inputs or not isinstance(obj, _CONTAINERS):
        raise KeyError(
            f"{name} has no method '__call__': name one in tabulate(..., method=...). "
            f"Its methods: {known}."
        )


_CONTAINERS = (List, Dict, State, list, tuple, dict)


def _methods(obj: Any) -> list[str]:
    """The public methods that the class of an object has beyond those of the core."""
    return sorted(
        {
            name
            for cls in type(obj).__mro__
            if not cls.__module__.startswith(("graftree.core.", "builtins"))
            for name, attribute in vars(cls).items()
            if methods.is_public(name)
            and callable(getattr(obj, name, None))
            and not isinstance(attribute, type)
        }
    )


def _uncalled(obj: Any) -> list[CallInfo]:
    """A row for each object in a container, which makes no calls."""
    return [
        CallInfo(number, id(x), type(x), path, "", None, None, None)
        for number, (path, x) in enumerate(outlines.first_paths(obj))
    ]


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
    """Draws calls and what their objects hold.

    Args:
        rich: The package.
        costs: The names of the columns of costs.
        totals: The sizes of all Variables by type, a column for each.
        column_options: For each column.
    """

    rich: Any
    costs: Sequence[str]
    totals: Mapping[type, Size]
    column_options: Mapping[str, Any]

    @property
    def _types(self) -> list[type]:
        return sorted(self.totals, key=lambda kind: kind.__name__)

    def table(
        self,
        rows: Sequence[tuple[CallInfo, ObjectInfo]],
        title: str,
        options: Mapping[str, Any],
    ) -> Any:
        whole = Size(*map(sum, zip(*self.totals.values(), Size(0, 0), strict=True)))
        defaults = {
            "show_header": True,
            "show_lines": True,
            "show_footer": True,
            "title": title,
            "caption": f"\nTotal Parameters: {_total(whole)}",
            "caption_style": "bold",
        }
        table = self.rich.table.Table(**{**defaults, **options})
        names = ["path", "type", "inputs", "outputs", *self.costs]
        for name in names[:-1]:
            table.add_column(name, **self.column_options)
        last = {"footer": self.rich.text.Text("Total", justify="right")}
        table.add_column(names[-1], **{**last, **self.column_options})
        for kind in self._types:
            footer = {"footer": self._text(_total(self.totals[kind]))}
            table.add_column(kind.__name__, **{**footer, **self.column_options})
        for call, info in rows:
            table.add_row(*map(self._text, self._cells(call, info)))
        return table

    def _cells(self, call: CallInfo, info: ObjectInfo) -> list[str]:
        return [
            outlines.escape(paths.to_string(call.path)),
            outlines.escape(call.type.__name__),
            call.inputs_repr,
            outlines.write(call.outputs),
            *[str(getattr(call, name)) for name in self.costs],
            *[_cell(info, kind) for kind in self._types],
        ]

    def _text(self, markup: str) -> Any:
        return self.rich.text.Text.from_markup(markup, emoji=False)


def _cell(info: ObjectInfo, kind: type) -> str:
    parts = []
    own = {str(k): _outline(v) for k, v in info.variable_groups.get(kind, {}).items()}
    if own:
        parts.append(outlines.write(own))
    if kind in info.stats:
        parts.append(f"[bold]{_total(info.stats[kind])}[/bold]")
    return "\n\n".join(parts)


def _outline(variable: Variable) -> Any:
    """The value of a Variable, among its metadata if it has any of its own."""
    metadata = variable.get_metadata(exclude_required=True)
    value = outlines.outline(variable.get_raw_value())
    known = {name: outlines.outline(x) for name, x in metadata.items() if x is not None}
    return {**known, "value": value} if known else value


def _total(size: Size) -> str:
    return f"{size.elements:,} [dim]({representations.format_bytes(size.bytes)})[/dim]"
