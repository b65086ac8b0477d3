"""How objects get into a trace and back, the same way for every transform.

    outside                                 inside
    arguments --packing--> groups of leaves --boundary: unpack--> objects -> function
                                                                               |
    objects <--boundary: commit-- groups <-- collect, packing <----------------'

- ``lifting.py``: a transform as a row of a table: `Call` outside, `Inside` inside.
- ``boundary.py``: unpack, collect, commit.
- ``packing.py``: the form in which leaves travel; ``signatures.py``: what is static.
- ``prefixes.py``, ``tree_prefixes.py``: axes, filters and shardings for leaves.
- ``plans.py``: the memo of a call; ``captures.py``, ``traced_once.py``: the memo of
  a trace, good as long as what the function reaches is as it was.
- ``propagation.py``: what survives the way back; ``arguments.py``, ``decorators.py``,
  ``axis_names.py``: forms of use.
- ``alias_reports.py``, ``loss_warnings.py``, ``static_contents.py``: what is refused or
  told; ``ref_contents.py``: array refs where JAX takes none.
"""
