"""JAX transforms over objects.

`boundary` is the one core: pack, unpack, collect, commit. `propagation` says what
survives the way back, `prefixes` how axes and filters are assigned to leaves,
`aliasing` what is refused. A file per transform says what goes in and out.
"""
