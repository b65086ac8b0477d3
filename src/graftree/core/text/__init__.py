"""How objects print.

    obj.__nnx_repr__()  ->  Object, Attr ...  ->  Piece  ->  lines

- ``representations.py``: the base classes of objects that print; the contents of our
  objects in print and in ``dir``.
- ``descriptions.py``: any value as a frame and its contents; arrays in short, and
  tables, for reports and messages.
- ``writing.py``: the one writer: full form or compact form, lines, colors; the parts
  that the compact form leaves out: equal siblings, defaults.
"""
