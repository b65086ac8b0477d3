"""How objects print.

    obj.__nnx_repr__()  ->  Object, Attr ...  ->  Piece  ->  lines

- ``representations.py``: the base classes of what prints; what ours print, and ``dir``
  lists.
- ``descriptions.py``: what any value says about itself: a frame, and what is in it;
  arrays in short, and tables, for reports and messages.
- ``writing.py``: the one writer: full form or compact form, lines, colors; what the
  compact form leaves out: equal siblings, defaults.
"""
