"""Functions mapped over axes and devices.

- ``vmap_pmap.py``: `vmap`, `pmap`; ``shard_map.py``: `shard_map`.
"""
