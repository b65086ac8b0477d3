"""Shows objects: in notebooks and HTML files, drawn by treescope, and as text.

Treescope is optional and is imported only when it draws. It asks objects for a
``__treescope_repr__``; ours answer with the function that this file registers. So a
notebook with treescope active needs no call to `display`.
"""

from __future__ import annotations

import html
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from graftree.core import hooks
from graftree.core.text import descriptions, writing


def display(*args: Any) -> None:
    """Shows objects: as clickable trees in a notebook, elsewhere as text.

    Args:
        *args: Any values. Without treescope, a notebook shows text too.

    Example:
        >>> nnx.display(nnx.Param(2))
        Param(
          value=2
        )
    """
    show = _show_tree if writing.in_ipython() else print
    for arg in args:
        show(arg)


def display_to_html(path: str | os.PathLike[str], *objects: Any) -> None:
    """Writes objects to an HTML file, as clickable trees for any browser.

    Args:
        path: The file, which is replaced if it exists. It needs no other file.
        *objects: Any values, shown one below the other.

    Raises:
        ImportError: If treescope is not installed; it comes with
            ``pip install treescope``.

    Example:
        >>> import os, pathlib, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "model.html")
        >>> nnx.debugging.display_to_html(path, nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
        >>> pathlib.Path(path).read_text()[:15]
        '<!DOCTYPE html>'
    """
    try:
        treescope = _treescope()
    except ImportError as error:
        raise ImportError(
            "nnx.debugging.display_to_html draws with treescope, which is not "
            "installed: pip install treescope"
        ) from error
    trees = [treescope.render_to_html(x, ignore_exceptions=True) for x in objects]
    title = html.escape(", ".join(type(x).__name__ for x in objects))
    page = _PAGE.format(title=title, body="\n<hr>\n".join(trees))
    pathlib.Path(path).write_text(page, encoding="utf-8")


_PAGE = """<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><title>{title}</title></head>
<body>
{body}
</body>
</html>
"""


def full_repr(x: Any) -> str:
    """Returns the whole text of an object, however long.

    The ``repr`` of a large object is shortened: equal siblings are folded, attributes
    that have their defaults are left out, arrays are shapes. To get the full one
    everywhere, set the flag: ``nnx.config.update("graftree_repr_lines", None)``. It is
    the number of lines up to which a ``repr`` is not shortened, by default 150.

    Args:
        x: Any value.

    Returns:
        The text, without colors.

    Example:
        >>> model = nnx.List([nnx.Linear(2, 3, rngs=nnx.Rngs(0)) for _ in range(12)])
        >>> model
        List([
          (0-11) 12 x Linear(kernel=Param(float32[2,3]), bias=Param(float32[3]),
              in_features=2, out_features=3)
        ]) # shortened; in full: print(nnx.debugging.full_repr(...))
        >>> len(nnx.debugging.full_repr(model).splitlines())
        206
    """
    return writing.full(x)


def _show_tree(x: Any) -> None:
    try:
        treescope = _treescope()
    except ImportError:
        print(x)
    else:
        treescope.display(x, ignore_exceptions=True, autovisualize=True)


def _treescope() -> Any:
    import treescope

    return treescope


def render_object_constructor(
    object_type: type,
    attributes: Mapping[str, Any],
    path: str | None,
    subtree_renderer: Any,
    roundtrippable: bool = False,
    color: str | None = None,
    first_line_annotation: Any = None,
) -> Any:
    """Draws an object as ``Type(name=value, ...)``; for a ``__treescope_repr__``.

    Args:
        object_type: The class to name.
        attributes: The attributes to show, by name.
        path: The path of the object, as treescope passed it.
        subtree_renderer: The function that draws the values, as treescope passed it.
        roundtrippable: Whether the text is Python that makes an equal object.
        color: The background color, or ``None``.
        first_line_annotation: A treescope part to show after the first line.

    Returns:
        A rendering part of treescope.

    Raises:
        ImportError: If treescope is not installed.

    Example:
        >>> import treescope
        >>> class Point:
        ...     def __treescope_repr__(self, path, subtree_renderer):
        ...         return nnx.visualization.render_object_constructor(
        ...             Point, {"x": 1}, path, subtree_renderer, roundtrippable=True
        ...         )
        >>> treescope.render_to_text(Point())
        'Point(x=1)'
    """
    drawn = [
        (f"{name}=", subtree_renderer(value, path=_join(path, f".{name}")))
        for name, value in attributes.items()
    ]
    frame = descriptions.Object(object_type)
    return _node(frame, drawn, path, color, first_line_annotation, roundtrippable)


def _render(obj: Any, path: str | None, subtree_renderer: Any) -> Any:
    """Draws the text of ``repr``: the same attributes, the same comment."""
    treescope = _treescope()
    parts = treescope.rendering_parts
    frame, attributes = descriptions.described(obj)
    drawn = []
    for index, attribute in enumerate(attributes):
        step = _step(frame, attribute.key, index)
        if attribute.use_raw_value:
            value = parts.text(str(attribute.value))
        else:
            try:
                value = subtree_renderer(attribute.value, path=_join(path, step))
            except Exception:  # of a value whose own repr raises
                value = parts.text(descriptions.safe_repr(attribute.value))
        drawn.append((f"{attribute.key}{frame.kv_sep}" if attribute.key else "", value))
    comment = parts.comment_color(parts.text(frame.comment))
    color = None
    if frame.kv_sep == "=" and not isinstance(frame.type, str):
        color = treescope.formatting_util.color_from_string(frame.type.__qualname__)
    return _node(frame, drawn, path, color, comment if frame.comment else None)


def _step(frame: descriptions.Object, key: Any, index: int) -> str:
    if frame.kv_sep == "=":
        return f".{key}"
    return f"[{key}]" if key else f"[{index}]"


def _join(path: str | None, step: str) -> str | None:
    # The path of the root is empty; None means that the object has no path.
    return None if path is None else path + step


def _node(
    frame: descriptions.Object,
    drawn: Iterable[tuple[str, Any]],
    path: str | None,
    color: str | None,
    comment: Any,
    roundtrippable: bool = False,
) -> Any:
    parts = _treescope().rendering_parts
    if isinstance(frame.type, str):
        name = parts.text(frame.type)
    else:
        name = parts.maybe_qualified_type_name(frame.type)
    start, end = parts.text(frame.start), parts.text(frame.end)
    if not roundtrippable:
        # In a mode that writes Python, angle brackets mark text that isn't Python.
        name = parts.siblings(
            parts.roundtrip_condition(roundtrip=parts.text("<")), name
        )
        end = parts.siblings(end, parts.roundtrip_condition(roundtrip=parts.text(">")))
    return parts.build_foldable_tree_node_from_children(
        prefix=parts.siblings(name, start),
        children=[parts.siblings_with_annotations(*line) for line in drawn],
        suffix=end,
        comma_separated=True,
        path=path,
        background_color=color,
        first_line_annotation=comment,
    )


hooks.treescope_repr.fill(_render)
