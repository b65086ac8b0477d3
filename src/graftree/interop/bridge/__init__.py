"""The bridge between Modules of this package and those of ``flax.linen``.

    linen_side.py       the one door to Flax, an optional package
    variables.py        collections of Linen as Variables, and back; boxes of metadata
    to_nnx.py           a Linen Module as a Module: `ToNNX`, `lazy_init`
    to_linen.py         a Module as a Linen Module: `ToLinen`, `to_linen`
    functional.py       a Module as two functions, `init` and `apply`
    contexts.py         which bridge Module runs now, and its scope
    modules.py          `bridge.Module`: Modules written in the style of Linen
    foreign_modules.py  Modules of both kinds inside of those

The public paths (``nnx.bridge``, ``nnx.bridge.wrappers``, ...) are rows of the table in
`interop/flax_names.py`. Nothing here is imported before a program asks for it.
"""
