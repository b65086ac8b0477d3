"""Modules that programs for Flax NNX import beside it, for machines without Flax.

    pytree_dataclasses.py   flax.struct
    frozen_dicts.py         flax.core, flax.traverse_util: dicts frozen and flat
    state_dicts.py          flax.serialization: objects as dicts and bytes
    type_aliases.py         flax.typing, flax.core.spmd: types and logical axis names
    training_loops.py       flax.training.train_state, flax.jax_utils,
                            flax.metrics.tensorboard

Results, pytree paths and bytes are those of Flax. `name_tables.BESIDE` has the
path in Flax of each name. Nothing here is imported before a program asks for it.
"""
