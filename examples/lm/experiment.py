"""The whole experiment, in order: make or restore, train, save, report, write text.

In a program of several processes all of them run this; the first one prints, and writes
what is not a checkpoint.
"""

import dataclasses
import math
import signal
from collections.abc import Callable

import jax
from rich import console as rich_console

import graftree as nnx
from examples.lm import curves, layouts, loops, progress, report, samples
from examples.lm.settings import Settings, WrongOption


def run(options: Settings, *, should_stop: Callable[[], bool]) -> signal.Signals | None:
    """Trains a model, or goes on training it, and tells how it went.

    Args:
        options: What to do.
        should_stop: Asked after each training step; ``True`` ends the training there,
            and all that is needed to go on is saved.

    Returns:
        The signal that stopped the experiment; ``None`` if it was finished.

    Raises:
        WrongOption: If the devices are not those of the mesh, or the folder has a run
            of another experiment in it. Then nothing has been done.
        OSError: If the results can't be written.
    """
    if not options.mesh:
        options = dataclasses.replace(options, mesh={"data": jax.device_count()})
    options.check()
    check_policy(options)
    layout = layouts.on_all_devices(options.mesh)
    older = read_same_experiment(options)
    console = rich_console.Console(quiet=jax.process_index() > 0)
    with layout.in_force():
        with console.status("making the model and compiling its step"):
            job = loops.Job(options, layout)
        record = describe(options, job)
        if older is not None and older.label == record.label:
            record.tokens_per_second = older.tokens_per_second
        say(console, report.sizes(record))
        stopped = train(job, record, options, console, should_stop)
    if stopped is not None:
        return stopped
    with layout.without_batch().in_force():
        text = samples.continue_text(
            job.model,
            options.prompt,
            options.sample,
            temperature=options.temperature,
            seed=options.seed,
        )
    say(console, f"a sample, after {options.prompt!r}:\n{samples.printable(text)}")
    if jax.process_index() == 0:
        report.draw_curve(record, options.output / "curve.png")
        say(console, f"the curve is {options.output / 'curve.png'}")
    loss = record.curve.held_out[-1][1]
    say(console, f"held-out loss: {loss:.4f}, {loss / math.log(2):.3f} bits/byte")
    return None


def check_policy(options: Settings) -> None:
    """Raises if ``--precision`` is not a precision policy.

    Raises:
        WrongOption: It says what is wrong.
    """
    try:
        policy = nnx.precision.Policy.parse(options.policy)
    except ValueError as error:
        reason = str(error).splitlines()[0]
        raise WrongOption(f"--precision: {reason}") from error
    if policy.params is None or policy.compute is None:
        raise WrongOption(f"--precision: {options.policy} lacks params= or compute=")


def read_same_experiment(options: Settings) -> curves.Record | None:
    """Returns the record of the run that goes on; ``None`` if a new one begins.

    Raises:
        WrongOption: If the losses of the run in the folder would be others.
    """
    try:
        older = curves.read(options.output)
    except ValueError as error:
        raise WrongOption(f"--output: {error}") from error
    if older is None:
        return None
    now = options.experiment()
    changed = [
        f"--{name.replace('_', '-')} was {older.experiment.get(name)}, is {value}"
        for name, value in now.items()
        if older.experiment.get(name) != value
    ]
    if changed:
        raise WrongOption(
            f"--output: {options.output} has a run of another experiment in it: "
            f"{', '.join(changed)}; take another folder, or delete it"
        )
    return older


def describe(options: Settings, job: loops.Job) -> curves.Record:
    """Returns the record of a run that begins."""
    state = nnx.sharding.report((job.model, job.optimizer))
    kind = jax.devices()[0].device_kind
    return curves.Record(
        label=options.label,
        experiment=options.experiment(),
        devices=f"{jax.device_count()} of {kind} in {jax.process_count()} process(es)",
        parameters=sum(x.size for x in jax.tree.leaves(nnx.state(job.model))),
        total_bytes=state.num_bytes,
        state_bytes=state.bytes_per_device,
        step_bytes=job.compiled.memory_analysis().temp_size_in_bytes,
        collectives={
            kind: (traffic.count, traffic.bytes)
            for kind, traffic in nnx.forecast.collectives(job.compiled).items()
        },
        curve=job.curve,
    )


def train(
    job: loops.Job,
    record: curves.Record,
    options: Settings,
    console: rich_console.Console,
    should_stop: Callable[[], bool],
) -> signal.Signals | None:
    """Trains from the last checkpoint on, if there is one, and shows it."""
    folder = options.output / "checkpoints"
    clock = progress.Clock(options.batch_size * options.length)

    def write_record() -> None:
        record.tokens_per_second = clock.tokens_per_second or record.tokens_per_second
        if jax.process_index() == 0:
            record.write(options.output)

    with nnx.checkpoints.Checkpoints(folder, every=options.every) as checkpoints:
        first = job.restore(checkpoints)
        if first:
            say(console, f"going on after step {first}, from {folder}")
        write_record()
        with progress.Display(console, job.curve, options.steps, clock) as display:
            stopped = job.fit(
                checkpoints,
                first=first,
                on_step=display.show_step,
                on_test=display.show_test,
                should_stop=should_stop,
            )
    write_record()
    if stopped is not None:
        done = len(job.curve.training)
        say(console, f"stopped after step {done}, which was saved to {folder}")
    return stopped


def say(console: rich_console.Console, text: str) -> None:
    """Prints a text as it is."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)
