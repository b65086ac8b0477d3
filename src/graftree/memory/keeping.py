"""Which values are kept for the way back, by names and by the paths of modules."""

from __future__ import annotations

from typing import Any

from graftree.transforms import policies
from graftree.transforms.policies import Policy


def save(*where: Any) -> Policy:
    """A policy for `nnx.remat` and `nnx.Stack`: keeps these values, and no others.

    A path begins at the argument of the function that the module is in. So in
    ``nnx.remat(Block.__call__)`` and in a `Stack`, where all layers are one program, it
    begins at the layer, and in ``nnx.remat(loss_fn)`` at the model. Of what the
    function closes over, it begins at the object whose method calls the function, or
    else at the module itself.

    Args:
        *where: Names given by `nnx.name`, and modules, of which the output is kept:
            patterns of paths, as in ``"blocks[*].attention"``, which end in the name of
            a method that is named (`debugging.named`); classes; functions of path and
            module; ``...`` for everything. Patterns select names, too.

    Returns:
        The policy. With ``|`` it is combined with others, also with those of
        ``jax.checkpoint_policies``: the first that keeps a value says where.

    Raises:
        TypeError: If something in ``where`` is none of these.
        ValueError: If there is nothing, or a pattern is malformed; and when a function
            is traced with the policy, if something matches no name and no module
            there. It is only a warning if a ``custom_vjp`` may hide it.

    Example:
        >>> class Block(nnx.Module):
        ...     def __init__(self, rngs):
        ...         self.up = nnx.Linear(2, 8, rngs=rngs)
        ...         self.down = nnx.Linear(8, 2, rngs=rngs)
        ...     def __call__(self, x):
        ...         return self.down(nnx.name(jnp.sin(self.up(x)), "hidden"))
        >>> policy = nnx.memory.save("hidden", "down")
        >>> stack = nnx.Stack(Block, 24, remat=policy, rngs=nnx.Rngs(0))
        >>> stack(jnp.ones((1, 2))).shape
        (1, 2)
        >>> dots = jax.checkpoint_policies.dots_saveable
        >>> stack = nnx.Stack(Block, 24, remat=policy | dots, rngs=nnx.Rngs(0))
    """
    return policies.selecting("nnx.memory.save", where)


def offload(*where: Any) -> Policy:
    """Like `save`, but what is kept waits in the memory of the host.

    It is copied there on the way forward, and back when it is needed. That takes time
    on the bus, and none of the device's memory. Where device and host are one, as on a
    CPU, it saves nothing.

    Args:
        *where: As for `save`.

    Returns:
        The policy; ``save("a") | offload("b", "c")`` keeps one on the device.

    Raises:
        TypeError: As `save`.
        ValueError: As `save`; and when a function is traced with the policy, if the
            devices can't use the memory ``pinned_host``.

    Example:
        >>> def f(x):
        ...     return jnp.cos(nnx.name(jnp.sin(x), "hidden"))
        >>> g = nnx.remat(f, policy=nnx.memory.offload("hidden"))
        >>> jnp.allclose(jax.grad(g)(1.0), jax.grad(f)(1.0))
        Array(True, dtype=bool)
    """
    return policies.selecting("nnx.memory.offload", where, is_offloaded=True)
