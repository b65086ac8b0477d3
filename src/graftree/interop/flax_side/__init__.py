"""What programs for Flax NNX import beside it, for machines without Flax.

    pytree_dataclasses.py   flax.struct
    nested_dicts.py         flax.traverse_util
    state_dicts.py          flax.serialization: objects as nested dicts, and back
    msgpack_bytes.py        flax.serialization: nested dicts as bytes, and back
    frozen_dicts.py         flax.core: dicts that can't be changed
    axis_rules.py           flax.core.spmd: logical axis names
    partition_boxes.py      flax.core.meta: values boxed with the names of their axes
    type_aliases.py         flax.typing
    train_states.py         flax.training.train_state
    device_copies.py        flax.jax_utils
    summary_writers.py      flax.metrics.tensorboard

Results, pytree paths and bytes are those of Flax. `flax_names.BESIDE` says at which
path of Flax each name is. Nothing here is imported before a program asks for it.
"""
