"""Checkpoints of a training run, step by step: `Checkpoints`.

    directory/
    ├── 100/                   a step; it has this name once it is whole
    │   ├── model/             an object, as `save` writes it
    │   ├── optimizer/
    │   ├── data/metadata      the states of a data iterator, as JSON
    │   └── _CHECKPOINT_METADATA   with the scores of the step, if it has some
    └── 200.orbax-checkpoint-tmp/      being written, or left by a run that was killed

A save copies the arrays to the host and returns; a thread of Orbax writes them, and one
of ours waits for it and deletes steps no longer needed. A step is deleted only when a
newer one is whole, and the best one only when a better one is whole.

The scores of a step are stored in its note. The note is JSON in a file that Orbax keeps
in the folder of a step. The folder gets its name only when that file is written too: no
whole step lacks its scores.
"""

from __future__ import annotations

import contextlib
import math
import operator
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any, Literal, Self, TypeVar

import jax

from graftree import errors
from graftree.checkpoints import (
    configs,
    data_states,
    files,
    orbax_side,
    processes,
    step_contents,
    stored_trees,
)
from graftree.core.graph import updates
from graftree.sharding import collectives
from graftree.training import early_stopping

T = TypeVar("T")
_DELETED = ".graftree-deleted"
_FindStep = Callable[[], int | None]


class Checkpoints:
    """Saves a training run every few steps, and restores it.

    In a program of several processes, all must make the same calls; if one fails in a
    process, it fails in all. From its first save until `close`, no other `Checkpoints`
    and no other program can save there; any number can read.

    Args:
        directory: Where the steps are; the first save makes it.
        keep: How many of the newest steps to keep on disk; ``None`` keeps all.
        every: `save` skips steps that are not multiples of this.
        best: The name of a score; the step with the best one on disk is also kept.
            ``None`` keeps no such step. Pass it again when you resume.
        mode: Whether the best score is the smallest, ``"min"``, or the largest,
            ``"max"``.
        config: A description to keep with each step, as for `save`; `config` returns
            it.

    Raises:
        ValueError: If ``keep`` or ``every`` is less than one, or ``mode`` is another
            word.
        TypeError: If a part of ``config`` can't be stored.

    Example:
        >>> import tempfile
        >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> folder = tempfile.mkdtemp()
        >>> with nnx.checkpoints.Checkpoints(folder, every=10) as checkpoints:
        ...     first = checkpoints.restore_latest(model=model) or 0
        ...     for step in range(first + 1, 26):
        ...         saved = checkpoints.save(step, model=model)
        ...     print(checkpoints.steps(), checkpoints.restore_latest(model=model))
        [10, 20] 20
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int | None = 3,
        every: int = 1,
        best: str | None = None,
        mode: Literal["min", "max"] = "min",
        config: Any = None,
    ) -> None:
        for name, value in (("keep", keep), ("every", every)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"Checkpoints expects {name} >= 1, got {value!r}.")
        if best is not None and not (isinstance(best, str) and best):
            raise ValueError(f"Checkpoints expects best to name a score, got {best!r}.")
        early_stopping.check_mode(mode, "Checkpoints")
        self._directory = orbax_side.path_of(directory)
        self._keep, self._every = keep, every
        self._best, self._mode = best, mode
        self._config = configs.to_json(config, "Checkpoints")
        self._writer: orbax_side.StepWriter | None = None  # made by the first save
        self._lock = processes.Lock(
            self._directory / processes.LOCK_ENDING, self._directory
        )
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._is_closed = False

    def save(
        self,
        step: int,
        *,
        force: bool = False,
        scores: Mapping[str, Any] | None = None,
        **objects: Any,
    ) -> bool:
        """Begins to save objects under a step; you may change or donate them at once.

        Waits for the previous save, if that is still being written.

        Args:
            step: The number of the step; greater than those saved before.
            force: Whether to save even if ``step`` is not a multiple of ``every``: at
                the end, or when the program is about to stop.
            scores: How good the step is: numbers, or arrays ``[]``, by name. They are
                stored with it. NaN is never the best score; among equal scores,
                the earlier is the best.
            **objects: What to save, by name: objects as for `save`, and data iterators
                (anything with ``get_state`` and ``set_state``).

        Returns:
            Whether the step is saved.

        Raises:
            CheckpointError: If the step, or a later one, has been saved; if the folder
                can't be written; if another writer saves there; or if the previous save
                failed.
            TypeError: If part of an object can't be stored, or a score is not a number.
            ValueError: If the score that decides which step is best is missing, or if
                scores differ between processes.

        Example:
            >>> import tempfile
            >>> with nnx.checkpoints.Checkpoints(tempfile.mkdtemp()) as checkpoints:
            ...     checkpoints.save(1, rngs=nnx.Rngs(0))
            True
        """
        if not force and self._skips(step):
            self._check_arguments(step, objects)
            # Of several processes, one would know earlier than the others.
            if jax.process_count() == 1:
                self._raise_failure()
            return False
        name = f"Checkpoints.save({step!r})"
        contents = step_contents.StepContents()

        def prepare() -> Any:
            self._check_arguments(step, objects)
            contents.config = self._config
            contents.scores = step_contents.checked_scores(scores, self._best)
            self.wait()
            contents.prepare(objects)
            return contents.shared()

        contents.settle(collectives.gathered(name, prepare))
        step = operator.index(step)
        try:
            collectives.by_first(name, lambda: self._enter(step))
            collectives.together(name, lambda: self._begin(step, contents))
        except BaseException:
            self._drop_writer()
            self._lock.rest()
            raise
        self._follow(step)
        return True

    def _skips(self, step: Any) -> bool:
        """Whether a step isn't saved; what is not a step is refused later."""
        return hasattr(type(step), "__index__") and step % self._every != 0

    def _check_arguments(self, step: int, objects: Mapping[str, Any]) -> None:
        self._check_open("save")
        if operator.index(step) < 0:
            raise ValueError(f"Checkpoints.save expects a step >= 0, got {step}.")
        step_contents.check_names(objects)

    def _enter(self, step: int) -> None:
        """Takes the folder for a new step; in the first process."""
        self._lock.take()
        self._check_new(step)
        with orbax_side.explained(f"Saving step {step} to", self._directory):
            self._clear()

    def _begin(self, step: int, contents: step_contents.StepContents) -> None:
        """Copies what is to be written, and begins to write it."""
        with orbax_side.explained(f"Saving step {step} to", self._directory):
            if self._writer is None:
                handler = orbax_side.load().CompositeCheckpointHandler()
                self._writer = orbax_side.StepWriter(handler, "Checkpoints.save")
            folder = self._directory / str(step)
            self._writer.begin(folder, contents.arguments(), contents.note())

    def _follow(self, step: int) -> None:
        """Starts the thread that waits until a step is whole."""
        processes.wait_at_end(self)
        orbax_side.silence(+1)
        self._thread = threading.Thread(
            target=self._finish, args=(step,), name="graftree-checkpoints"
        )
        self._thread.start()

    def restore_latest(self, **objects: Any) -> int | None:
        """Fills objects from the latest save: all of them, or none.

        Variables stay the same objects, and arrays go onto the shardings that they have
        now. Name all objects of the step, so that none is forgotten; ``None`` leaves
        one on disk.

        Args:
            **objects: The objects to fill, by the names under which they were saved.

        Returns:
            The step; ``None`` if nothing has been saved, and nothing is changed.

        Raises:
            CheckpointError: If the names differ from the saved ones, or the step can't
                be read. If it is deleted during the call, that is not an error: the
                next one is read.
            StateMismatchError: If an object does not fit; lists all differences.

        Example:
            >>> import tempfile
            >>> rngs = nnx.Rngs(0)
            >>> with nnx.checkpoints.Checkpoints(tempfile.mkdtemp()) as checkpoints:
            ...     print(checkpoints.restore_latest(rngs=rngs))
            None
        """
        name = "Checkpoints.restore_latest"
        return self._restore_if_any(name, self.latest_step, "", objects)

    def restore_best(self, **objects: Any) -> int | None:
        """Fills objects from the best step, as `restore_latest` does from the latest.

        Args:
            **objects: The objects to fill, by the names under which they were saved.

        Returns:
            The step; ``None`` if nothing has been saved, and nothing is changed.

        Raises:
            CheckpointError: If no step on disk has a number as its score.
            ValueError: If no ``best`` was given when this object was made.

        Example:
            >>> import tempfile
            >>> model = nnx.Dict(weight=nnx.Param(jnp.array(0.0)))
            >>> folder = tempfile.mkdtemp()
            >>> with nnx.checkpoints.Checkpoints(folder, keep=1, best="loss") as kept:
            ...     for step, loss in enumerate([0.5, 0.2, 0.3, 0.4]):
            ...         model.weight[...] = jnp.array(10.0 * step)
            ...         saved = kept.save(step, model=model, scores={"loss": loss})
            ...     print(kept.steps(), kept.restore_best(model=model))
            [1, 3] 1
            >>> model.weight[...].item()
            10.0
        """
        condition = f" whose score {self._best!r} is a number"
        name = "Checkpoints.restore_best"
        return self._restore_if_any(name, self.best_step, condition, objects)

    def _restore_if_any(
        self, name: str, find_step: _FindStep, condition: str, objects: dict[str, Any]
    ) -> int | None:
        if find_step() is None and not self.steps():
            return None
        return self._restore(name, find_step, condition, objects)

    def restore(self, step: int, **objects: Any) -> None:
        """Fills objects from a step, as `restore_latest` does from the latest.

        Args:
            step: The number of the step.
            **objects: The objects to fill, by the names under which they were saved.

        Raises:
            CheckpointError: If there is no such step; lists the steps on disk.

        Example:
            >>> import tempfile
            >>> rngs = nnx.Rngs(0)
            >>> with nnx.checkpoints.Checkpoints(tempfile.mkdtemp()) as checkpoints:
            ...     _ = checkpoints.save(1, rngs=rngs)
            ...     first = rngs()
            ...     checkpoints.restore(1, rngs=rngs)
            >>> bool(rngs() == first)
            True
        """
        step = operator.index(step)

        def find_step() -> int | None:
            return step if step in self.steps() else None

        self._restore("Checkpoints.restore", find_step, f" {step}", objects)

    def steps(self) -> list[int]:
        """Lists the steps on disk, in order; waits for the one being written.

        Example:
            >>> import tempfile
            >>> nnx.checkpoints.Checkpoints(tempfile.mkdtemp()).steps()
            []
        """
        return self._by_first("Checkpoints.steps", self._steps_on_disk)

    def _by_first(self, name: str, look: Callable[[], T]) -> T:
        """Waits for the save, and has the first process look at the disk."""

        def look_there() -> T | None:
            self.wait()
            return look() if collectives.is_first() else None

        return collectives.gathered(name, look_there)[0]

    def latest_step(self) -> int | None:
        """Returns the newest step on disk; ``None`` if there is none.

        Example:
            >>> import tempfile
            >>> print(nnx.checkpoints.Checkpoints(tempfile.mkdtemp()).latest_step())
            None
        """
        return max(self.steps(), default=None)

    def best_step(self) -> int | None:
        """Returns the step on disk with the best score; ``None`` if there is none.

        Raises:
            CheckpointError: If scores can't be read.
            ValueError: If no ``best`` was given when this object was made.

        Example:
            >>> import tempfile
            >>> best = {"best": "accuracy", "mode": "max"}
            >>> with nnx.checkpoints.Checkpoints(tempfile.mkdtemp(), **best) as kept:
            ...     for step, accuracy in enumerate([0.5, 0.8, 0.7, float("nan")]):
            ...         scores = {"accuracy": accuracy}
            ...         saved = kept.save(step, rngs=nnx.Rngs(0), scores=scores)
            ...     print(kept.best_step())
            1
        """
        if self._best is None:
            raise ValueError(
                "Checkpoints: there is no score that decides which step is the best.\n"
                'Name one when you make it: Checkpoints(directory, best="loss").'
            )
        return self._by_first("Checkpoints.best_step", self._best_on_disk)

    def should_stop(self, step: int) -> bool:
        """Whether the program is about to be stopped, so that it should save and end.

        A single process hears SIGTERM, which from the first call on no longer ends
        it; the second one does. Several processes agree on a step, as JAX arranges it.

        Args:
            step: The number of the step; the same in all processes.

        Raises:
            RuntimeError: If the first call is not in the main thread.

        Example:
            >>> import tempfile
            >>> with nnx.checkpoints.Checkpoints(tempfile.mkdtemp()) as checkpoints:
            ...     checkpoints.should_stop(0)
            False
        """
        self._check_open("should_stop")
        return processes.stop_signal.should_stop(self, operator.index(step))

    def wait(self) -> None:
        """Returns when everything saved is on disk.

        Raises:
            CheckpointError: If a save failed. Raised once, by this or the next call of
                any other method.

        Example:
            >>> import tempfile
            >>> nnx.checkpoints.Checkpoints(tempfile.mkdtemp()).wait()
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            processes.need_not_wait(self)
        self._raise_failure()

    def close(self) -> None:
        """Waits, then releases the threads, the folder and SIGTERM's handler.

        Raises:
            CheckpointError: If the last save failed.

        Example:
            >>> import tempfile
            >>> nnx.checkpoints.Checkpoints(tempfile.mkdtemp()).close()
        """
        self._is_closed = True
        processes.stop_signal.end(self)
        try:
            self.wait()
        finally:
            writer, self._writer = self._writer, None
            try:
                if writer is not None:
                    with orbax_side.quiet():
                        writer.close()
            finally:
                self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: Any, error: BaseException | None, __: Any) -> None:
        try:
            self.close()
        except errors.CheckpointError as failure:
            if error is None:
                raise
            error.add_note(str(failure))

    def _check_open(self, method: str) -> None:
        if self._is_closed:
            raise ValueError(f"Checkpoints.{method}: this Checkpoints has been closed.")

    def _check_new(self, step: int) -> None:
        saved_steps = self._steps_on_disk()
        if step in saved_steps:
            problem = f"step {step} has already been saved"
        elif saved_steps and step < saved_steps[-1]:
            problem = (
                f"step {step} comes before {saved_steps[-1]}, which is already saved"
            )
        else:
            return
        raise errors.CheckpointError(
            f"Checkpoints.save: {problem} in {self._directory}.\nSave each step once, "
            "in order. For another run, use another folder or delete the later steps."
        )

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            self._drop_writer()
            raise failure

    def _drop_writer(self) -> None:
        """Gives up one that has failed: its remaining work would fail the next."""
        writer, self._writer = self._writer, None
        if writer is not None:
            with orbax_side.quiet(), contextlib.suppress(Exception):
                writer.close()

    # In the background. A failure of one process is one of all: so each knows of it
    # when its thread has ended, and raises it in the next call.

    def _finish(self, step: int) -> None:
        """Waits until a step is whole, then deletes steps that need not be kept."""
        action = f"Saving step {step} to"
        writer: Any = self._writer
        try:
            writer.finish()
            action = f"Step {step} was saved, but deleting the oldest steps in"
            writer.barriers.together(self._delete_old)
        except BaseException as error:
            failure = orbax_side.explanation(action, self._directory, error)
            failure.__cause__ = error
            self._failure = failure
            orbax_side.let_threads_fail()
            # Other processes may still write there, and would not end; the next save
            # clears it.
            if jax.process_count() == 1:
                with contextlib.suppress(OSError):  # the disk may be full
                    self._clear()
        else:
            # Lets it be collected, which frees its lock.
            processes.need_not_wait(self)
        finally:
            self._lock.rest()
            orbax_side.silence(-1)

    def _steps_on_disk(self) -> list[int]:
        with orbax_side.explained(orbax_side.READING, self._directory):
            steps = orbax_side.steps_in(self._directory)
            # Another program may rename entries of a folder while it is listed: the
            # step that it deletes is gone then, and the next one is not listed yet.
            max_listings = (
                0 if orbax_side.is_remote(self._directory) else _MOST_LISTINGS
            )
            for _ in range(max_listings):
                previous, steps = steps, orbax_side.steps_in(self._directory)
                if steps == previous:
                    break
            return steps

    def _best_on_disk(self) -> int | None:
        steps = self._steps_on_disk()
        for _ in range(_MOST_LISTINGS):
            best = self._best_of(steps)
            # Steps that another program has deleted since had no score to read.
            previous, steps = steps, self._steps_on_disk()
            if steps == previous:
                break
        return best

    def _best_of(self, steps: list[int]) -> int | None:
        """Returns the step with the best score, if any; among equals, the first."""
        best_score, best_step = early_stopping.WORST[self._mode], None
        for step in steps:
            folder = self._directory / str(step)
            with orbax_side.explained(orbax_side.READING, folder):
                scores = orbax_side.read_note(folder).get(step_contents.SCORES, {})
                score = scores.get(self._best, math.nan)
                is_better = early_stopping.is_better(score, best_score, self._mode)
            if is_better:
                best_score, best_step = score, step
        return best_step

    def _delete_old(self) -> None:
        if not collectives.is_first():
            return
        steps = self._steps_on_disk()
        old = steps[: -self._keep] if self._keep else []
        best = self._best_of(steps) if old and self._best else None
        for step in old:
            if step != best:
                _delete(self._directory / str(step))

    def _clear(self) -> None:
        """Deletes leftovers of killed runs and failed saves."""
        if not self._directory.exists():
            return
        for folder in self._directory.iterdir():
            step_name, dot, end = folder.name.partition(".")
            if step_name.isdecimal() and dot + end in _LEFTOVERS:
                folder.rmtree()

    def _folder_of(self, step: int | None, condition: str) -> Any:
        """Returns the folder of a step, or raises if ``step`` is ``None``.

        Args:
            step: The step that was looked for, if there is one.
            condition: Says in the error which step was looked for.
        """
        # Not listed again: another program may have deleted it since.
        if step is not None:
            return self._directory / str(step)
        saved_steps = self.steps()
        saved = (
            f"Saved steps: {_spell_steps(saved_steps)}."
            if saved_steps
            else "No step is saved there."
        )
        raise errors.CheckpointError(
            f"There is no step{condition} in {self._directory}. {saved}"
        )

    def _restore(
        self,
        name: str,
        find_step: _FindStep,
        condition: str,
        objects: Mapping[str, Any],
    ) -> int:
        """Fills objects with a step; returns its number."""
        asked = {name: obj for name, obj in objects.items() if obj is not None}
        iterators = {n: x for n, x in asked.items() if data_states.is_iterator(x)}
        rest = {name: obj for name, obj in asked.items() if name not in iterators}

        def read(folder: Any) -> Any:
            def compare() -> Any:
                _check_saved_names(folder, objects)
                return _compare(folder, rest, iterators)

            restored, states = collectives.together(name, compare)
            stored_trees.read_all(name, restored)
            return folder, restored, states

        folder, restored, states = files.steadily(
            name, lambda: self._folder_of(find_step(), condition), read
        )
        old_states: dict[str, Any] = {}

        def set_iterators() -> dict[str, Any]:
            old_states.update((key, x.get_state()) for key, x in iterators.items())
            for key, iterator in iterators.items():
                iterator.set_state(states[key])
            return {key: restored[key].update() for key in rest}

        # Objects and iterators: all of them, or none.
        try:
            new = collectives.together(name, set_iterators)
            if rest:
                collectives.together(name, lambda: updates.update(rest, new))
        except BaseException as error:
            for key, state in old_states.items():
                iterators[key].set_state(state)
            is_misfit = not isinstance(error, errors.CheckpointError)
            if isinstance(error, ValueError) and is_misfit:
                error.add_note(
                    "Objects that can't be filled in place, such as a TrainState, are "
                    "restored as new objects: "
                    f'nnx.checkpoints.restore("{folder}/<name>", like).'
                )
            raise
        return int(folder.name)


def _compare(
    folder: Any, objects: Mapping[str, Any], iterators: Mapping[str, Any]
) -> tuple[dict[str, stored_trees.Restored], dict[str, Any]]:
    """Returns the objects of a step, still to be read, and the iterators' states."""
    message = f"Checkpoints: {folder} does not fit the objects. Nothing has changed."
    folders = {name: folder / name for name in objects}
    way_out = (
        "To allow some of these, use "
        f'nnx.checkpoints.restore("{folder}/<name>", like, missing=..., '
        "unexpected=..., cast=...)."
    )
    restored = stored_trees.compare(folders, objects, message, way_out)
    states = {
        name: data_states.from_json(
            name, folder / name, jax.process_index(), jax.process_count()
        )
        for name in iterators
    }
    return restored, states


_LEFTOVERS = (orbax_side.PARTIAL, _DELETED)


_MOST_LISTINGS = 10


def _delete(folder: Any) -> None:
    """Deletes a step so that it never looks whole when it is not."""
    if orbax_side.is_remote(folder):
        (folder / orbax_side.COMMITTED).unlink(missing_ok=True)
    else:
        renamed = folder.parent / (folder.name + _DELETED)
        if renamed.exists():
            renamed.rmtree()
        folder = folder.rename(renamed)
    folder.rmtree()


def _check_saved_names(folder: Any, objects: Mapping[str, Any]) -> None:
    """Raises if the objects asked for are not those that were saved."""
    saved = sorted(x.name for x in folder.iterdir() if x.is_dir())
    missing = [name for name in objects if name not in saved]
    forgotten = [name for name in saved if name not in objects]
    if not missing and not forgotten:
        return
    lines = [f"{name}: requested, but not saved" for name in missing]
    lines += [f"{name}: saved, but not requested" for name in forgotten]
    way_out = f"Saved objects: {', '.join(saved) or 'none'}."
    if forgotten:
        leave = ", ".join(f"{name}=None" for name in forgotten)
        way_out += f"\nTo leave some of them on disk, pass {leave}."
    raise errors.CheckpointError(
        errors.message(
            f"The objects in {folder} are not the ones requested.",
            where="\n".join(lines),
            way_out=way_out,
        )
    )


def _spell_steps(steps: list[int]) -> str:
    shown = ", ".join(map(str, steps[-10:]))
    return shown if len(steps) <= 10 else f"..., {shown}"
