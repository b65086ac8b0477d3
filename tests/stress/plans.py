"""Repeated calls against first ones: random changes of the arguments between them.

``python -m tests.stress.plans --seed 0 --count 20`` runs so many random programs in
each of the transforms below, in each mode. A program calls one function again and
again, kept for all programs, and changes its arguments between the calls; beside it a
function that was never called before gets arguments of its own, changed in the same
way. What both return and leave behind must be the same. Arguments are a model, a
State, Variables in containers, an array; changes are those of `test_repeated_calls`.

With ``--caches`` all programs run twice: with everything that is remembered between
calls, and without. Then errors must have the same text, and no program changes a hash
in place: JAX remembers the first object of equal ones, and a transform that changes the
structure of a model gives it that one. To change it is to change other models' too.
"""

import argparse
import collections
import random
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np

import graftree as nnx
from tests.modes import BY_NAME
from tests.transforms.lifting import test_repeated_calls as repeated
from tests.transforms.lifting.test_repeated_calls import visit


def looped(f, **mode):
    def step(_, tree):
        f(tree)
        return tree

    return lambda tree: nnx.fori_loop(0, 1, step, tree, **mode) and None


def with_own_derivative(f, **mode):
    made = nnx.custom_vjp(f, **mode)
    made.defvjp(lambda tree: (f(tree), None), lambda residuals, out: (None,))
    return made


def sharded(f, **mode):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
    spec = jax.sharding.PartitionSpec()
    return nnx.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec, **mode)


# Each makes a function of a tree of arguments.
TRANSFORMS = {
    "jit": lambda f, **mode: nnx.jit(f, **mode),
    "grad": repeated.differentiated,
    "vmap": repeated.mapped,
    "scan": repeated.scanned,
    "remat": nnx.remat,
    "cond": lambda f, **mode: lambda tree: nnx.cond(True, f, f, tree, **mode),
    "switch": lambda f, **mode: lambda tree: nnx.switch(1, [f, f], tree, **mode),
    "fori_loop": looped,
    "eval_shape": lambda f, **mode: lambda tree: nnx.eval_shape(f, tree, **mode),
    "custom_vjp": with_own_derivative,
    "shard_map": sharded,
}


def first_call(name, mode):
    """A function that was never called; of `jit` the one that it compiles.

    A program of its own for each call would take a second.
    """
    if name == "jit":
        return visit
    return TRANSFORMS[name](visit, **mode)


# Changes of objects that are keys of JAX's caches.
HASHES = "hash", "hash in a tuple"
# How many calls were made in each transform, and of these raised.
made, raised = collections.Counter(), collections.Counter()


def play(kept, name, mode, program, changes):
    """Runs one program; raises if the calls differ."""
    ours, theirs = repeated.arguments(), repeated.arguments()
    for change, k, calls in program:
        for _ in range(calls):
            one = outcome(kept, ours)
            other = outcome(first_call(name, mode), theirs)
            repeated.check_same(one, other)
            assert not isinstance(one, str) or one == other, (one, other)
            raised[name] += isinstance(one, str)
            made[name] += 1
        for tree in (ours, theirs):
            repeated.changed(tree, changes[change], k)
    repeated.check_alike(ours, theirs)


def check_first_calls(name, mode, programs, changes):
    """Runs programs beside first calls; gives the error of each that differs."""
    kept = TRANSFORMS[name](visit, **mode)
    for program in programs:
        try:
            play(kept, name, mode, program, changes)
        except Exception as error:
            yield program, error


def played(kept, program, changes):
    """What the calls of one program give, and what it leaves behind."""
    tree, outcomes = repeated.arguments(), []
    for change, k, calls in program:
        outcomes += [outcome(kept, tree, with_text=True) for _ in range(calls)]
        repeated.changed(tree, changes[change], k)
    return outcomes, tree


def check_caches(name, mode, programs, changes):
    """Runs programs with caches and without; gives the error of each that differs."""
    with_caches = TRANSFORMS[name](visit, **mode)
    first = [played(with_caches, program, changes) for program in programs]
    with nnx.debugging.disable_caches():
        without = TRANSFORMS[name](visit, **mode)
        second = [played(without, program, changes) for program in programs]
    for program, ours, theirs in zip(programs, first, second, strict=True):
        made[name] += len(ours[0])
        raised[name] += sum(isinstance(x, str) for x in ours[0])
        try:
            for one, other in zip(ours[0], theirs[0], strict=True):
                if isinstance(one, str) or isinstance(other, str):
                    assert one == other, (one, other)
                repeated.check_same(one, other)
            repeated.check_alike(ours[1], theirs[1])
        except Exception as error:
            yield program, error


def outcome(function, tree, with_text=False):
    """The arrays that a call gives, or its error: the kind of that, or all its text."""
    try:
        out = function(tree)
    except (TypeError, ValueError) as error:
        text = type(error).__name__
        message = re.sub(r"0x[0-9a-f]+", "0x...", str(error))
        return f"{text}: {message}" if with_text else text
    numbers = jax.tree.map(lambda x: jnp.shape(x) if hasattr(x, "shape") else x, out)
    return repeated.arrays(out), numbers


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--only", nargs="*", default=[*TRANSFORMS])
    text = "run each with caches and without"
    parser.add_argument("--caches", action="store_true", help=text)
    options = parser.parse_args(argv)
    ran, failed = collections.Counter(), 0
    for name in options.only:
        for mode_name, mode in BY_NAME.items():
            _, _, changes = repeated.form_of("together", mode)
            # What JAX lists of a derivative has no end if an object contains itself.
            left_out = {"a way back"} | ({*HASHES} if options.caches else set())
            names = [x for x in changes if x not in left_out] + repeated.SWITCHES * 4
            programs = []
            for number in range(options.count):
                draw = random.Random(f"{options.seed} {name} {mode_name} {number}")
                programs.append(
                    [
                        (draw.choice(names), draw.randint(0, 1), draw.randint(1, 3))
                        for _ in range(draw.randint(1, 5))
                    ]
                )
            ran[name] += len(programs)
            check = check_caches if options.caches else check_first_calls
            for program, error in check(name, mode, programs, changes):
                failed += 1
                print(f"{name} {mode_name} {program}: {error!r}", flush=True)
        calls = f"{made[name]} calls of each, of which {raised[name]} raised"
        print(f"{name}: {ran[name]} programs, {calls}", flush=True)
    print(f"{ran.total()} programs in {len(ran)} transforms, {failed} failed")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
