"""How objects print.

    obj.__nnx_repr__()  ->  writing.Object, writing.Attr ...  ->  text, in colors

- ``representations.py``: the base classes of what prints, and lines of totals.
- ``forms.py``: which form a text has, full or compact.
- ``writing.py``: the full form: what an object yields about itself becomes text.
- ``condensing.py``: the compact form, with ``folding.py`` (which siblings are equal),
  ``constructors.py`` (which attributes have their defaults) and ``layouts.py`` (lines).
- ``completions.py``: what ``dir`` lists.
- ``columns.py``: plain tables; ``alike_rows.py``: one row for layers that are alike.
- ``colors.py``: escape codes, and whether the terminal takes them.
"""
