"""How objects print.

    obj.__nnx_repr__()  ->  writing.Object, writing.Attr ...  ->  text, in colors

- ``writing.py``: the engine: what an object yields about itself becomes text.
- ``representations.py``: the base classes of what prints, and lines of totals.
- ``colors.py``: escape codes, and whether the terminal takes them.
"""
