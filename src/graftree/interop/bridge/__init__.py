"""Bridges Modules of this package and those of ``flax.linen``.

    linen_side.py   the one door to Flax, an optional package; collections of Linen as
                    Variables, and back; boxes of metadata
    wrappers.py     a Linen Module as a Module: `ToNNX`, `lazy_init`; a Module as a
                    Linen Module: `ToLinen`, `to_linen`
    binding.py      the bridge Module that runs now, and how it gets its variables
    linen_style.py  `bridge.Module`: Modules written in the style of Linen, and Modules
                    of both kinds inside of those; `functional`: `init` and `apply`

The public paths (``nnx.bridge``, ``nnx.bridge.wrappers``, ...) are rows of the table in
`interop/name_tables.py`. Nothing here is imported before a program asks for it.
"""
