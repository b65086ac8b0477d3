"""The loop around the training step: train, test, save, stop."""

import dataclasses
import functools
import signal
from collections.abc import Callable

import jax

import graftree as nnx
from examples.lm import curves, data, layouts, restacking, settings, train
from examples.lm.model import Config, LanguageModel
from examples.lm.settings import Settings


class Job:
    """A model in training, with all that its loop needs.

    Attributes:
        model: The model.
        optimizer: Its optimizer.
        curve: The losses so far.
        compiled: The training step, compiled for this layout.
    """

    def __init__(self, options: Settings, layout: layouts.Layout):
        text = data.load()
        size, length = options.batch_size, options.length
        self._options = options
        self._layout = layout
        self._batches = data.Batches(
            text.train, size, length, options.seed, layout.batch
        )
        self._held_out = data.held_out_batches(
            text.held_out, size, length, layout.batch
        )
        self.model, self.optimizer = train.make_state(
            config_of(options), recipe_of(options), layout, options.seed
        )
        self.curve = curves.Curve(stacked=options.stack)
        self.compiled = train.train_step.lower(
            self.model,
            self.optimizer,
            self._batches(0),
            micro_batches=options.accumulate,
        ).compile()

    def step(self, number: int) -> jax.Array:
        """Trains by the batch of this number; returns its loss before that."""
        return self.compiled(self.model, self.optimizer, self._batches(number))

    def restore(self, checkpoints: nnx.checkpoints.Checkpoints) -> int:
        """Goes back to the last checkpoint; returns its step, or 0."""
        # The curve first: it says in which form the others are.
        step = checkpoints.restore_latest(curve=self.curve, model=None, optimizer=None)
        if step is None:
            return 0
        own = self.model, self.optimizer
        is_same_form = self.curve.stacked == self._options.stack
        objects = own if is_same_form else self._in_other_form()
        checkpoints.restore(step, curve=None, model=objects[0], optimizer=objects[1])
        if objects is not own:
            restacking.fill(own, objects)
        self.curve.stacked = self._options.stack
        return step

    def _in_other_form(self) -> tuple[LanguageModel, nnx.Optimizer]:
        """An abstract model and optimizer, with a Stack for a List or reverse."""
        config = config_of(self._options)
        config = dataclasses.replace(config, stacked=not config.stacked)
        make = functools.partial(
            train.make_objects, config, recipe_of(self._options), self._options.seed
        )
        return nnx.merge(*nnx.get_abstract_model(make, self._layout.mesh))

    def fit(
        self,
        checkpoints: nnx.checkpoints.Checkpoints,
        *,
        first: int,
        on_step: Callable[[], None],
        on_test: Callable[[], None],
        should_stop: Callable[[], bool],
    ) -> signal.Signals | None:
        """Trains to the end, or until it is asked to stop; then all is saved.

        Args:
            checkpoints: Where to save.
            first: The number of steps that have been done.
            on_step: Called after each step, when the curve has it.
            on_test: Called after each test, when the curve has it.
            should_stop: Asked after each step; ``True`` ends the training there.

        Returns:
            What stopped it: ``SIGINT`` for ``should_stop``; ``None`` if nothing did.
        """
        options = self._options
        for step in range(first + 1, options.steps + 1):
            self.curve.training.append(_read(self.step(step)))
            on_step()
            stopped = _stopped(checkpoints, step, should_stop)
            is_last = step == options.steps
            if is_last or step % options.every == 0:
                self.curve.held_out.append((step, self.test()))
                on_test()
            self._save(checkpoints, step, force=is_last or stopped is not None)
            if stopped is not None:
                return stopped
        return None

    def test(self) -> float:
        """Returns the loss of the held-out text."""
        losses = [
            _read(train.test_step(self.model, tokens)) for tokens in self._held_out
        ]
        return sum(losses) / len(losses)

    def _save(
        self, checkpoints: nnx.checkpoints.Checkpoints, step: int, force: bool
    ) -> None:
        checkpoints.save(
            step,
            force=force,
            model=self.model,
            optimizer=self.optimizer,
            curve=self.curve,
        )


def _read(loss: jax.Array) -> float:
    # At once: of programs that wait for simulated devices, several at a time can take
    # all threads that there are, and then none ends (seen with JAX 0.10).
    return float(nnx.sharding.fetch(loss))


def config_of(options: Settings) -> Config:
    """Returns the sizes of the model."""
    return Config(
        vocabulary=settings.VOCABULARY,
        layers=options.layers,
        width=options.width,
        heads=options.heads,
        kv_heads=options.kv_heads,
        hidden=options.hidden,
        stacked=options.stack,
        remat=options.remat,
    )


def recipe_of(options: Settings) -> train.Recipe:
    """Returns how the model is trained."""
    return train.Recipe(steps=options.steps, precision=options.policy)


def _stopped(
    checkpoints: nnx.checkpoints.Checkpoints, step: int, should_stop: Callable[[], bool]
) -> signal.Signals | None:
    # Processes must stop at the same step: they agree on one about SIGTERM only.
    if jax.process_count() == 1 and should_stop():
        return signal.SIGINT
    return signal.SIGTERM if checkpoints.should_stop(step) else None
