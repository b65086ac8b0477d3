"""Optimizers: an Optax transformation together with its state.

An `Optimizer` does not hold the model: you pass it to each `Optimizer.update`. It keeps
the state of one Optax transformation for the leaves that ``wrt`` selects, boxed in
Variables so that ``split``, ``jit`` and checkpoints treat it like any other state.
Always:

- Optax sees States: of Variables in ``init``, of plain arrays in ``update``; unless a
  mask or another tree in the transformation has another form (`optax_forms`);
- all Variables stay the same objects, only their raw values change;
- an update computes first and writes last: if anything raises, nothing has changed.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from graftree import _jax, namespaces
from graftree.annotations import Filter, Path
from graftree.core import filters, paths
from graftree.core.graph import functional, updates
from graftree.core.objects import attributes, methods, pytrees
from graftree.core.states import flat_states, pure_dicts, states
from graftree.core.variables import partitioning, sharding, variables
from graftree.core.variables.kinds import Param
from graftree.nn.support import arguments
from graftree.training import optax_forms, step_checks

if TYPE_CHECKING:
    import optax
else:
    optax = namespaces.OnUse("optax")

M = TypeVar("M")
REQUIRED: Any = variables.MISSING

_OLD_USE = (
    "To have the optimizer keep the model, as older programs expect, use "
    "nnx.ModelAndOptimizer(model, tx)."
)


class OptState(variables.Variable):
    """A Variable of an optimizer; as a filter, it selects all optimizer state.

    Example:
        >>> import optax
        >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
        >>> list(nnx.state((model, optimizer), nnx.OptState))
        [1]
    """


class OptArray(OptState):
    """Optimizer state that does not belong to a Variable, such as a counter.

    Example:
        >>> from graftree.training import optimizers
        >>> optimizers.to_opt_state({"count": jnp.array(0)})["count"]
        OptArray( # 1 (4 B)
          value=Array(0, dtype=int32, weak_type=True)
        )
    """


class OptVariable(OptState):
    """Optimizer state made from a Variable of the model, e.g. a moment of a Param.

    Example:
        >>> from graftree.training import optimizers
        >>> optimizers.to_opt_state({"mu": nnx.Param(jnp.zeros(2), tag="a")})["mu"]
        OptVariable( # 2 (8 B)
          value=Array([0., 0.], dtype=float32),
          tag='a'
        )
    """


def to_opt_state(tree: Any) -> Any:
    """Boxes the leaves of an Optax state in optimizer Variables.

    A Variable becomes an `OptVariable` with its value and its metadata, except that an
    entry ``optimizer_sharding`` replaces ``out_sharding``. Any other leaf becomes an
    `OptArray`.

    Args:
        tree: A pytree; Variables are leaves.

    Returns:
        A new tree of the same structure. It shares the arrays of ``tree``, except those
        that move because metadata annotates a sharding.

    Raises:
        ValueError: If an array cannot have the annotated sharding.

    Example:
        >>> from graftree.training import optimizers
        >>> kernel = nnx.Param(jnp.ones((2, 3)), optimizer_sharding=())
        >>> optimizers.to_opt_state([kernel])[0].out_sharding
        ()
    """
    return jax.tree.map(_box, tree, is_leaf=variables.is_variable)


def _box(leaf: Any, param: Any = None) -> OptState:
    """Boxes one leaf, without its annotation if that is for another shape."""
    if not variables.is_variable(leaf):
        return OptArray(leaf)
    value = leaf.get_value()
    entries = leaf.get_metadata()
    is_apart = "optimizer_sharding" in entries
    if is_apart:
        entries["out_sharding"] = entries.pop("optimizer_sharding")
    elif param is not None:
        value = sharding.moved(value, param)
    if getattr(param, "shape", None) not in (None, getattr(value, "shape", None)):
        # Factored moments do not have the dimensions that the annotation names.
        entries.pop("out_sharding", None)
    return _make_opt_variable(value, entries, is_apart)


def _make_opt_variable(
    value: Any, entries: dict[str, Any], is_apart: bool
) -> OptVariable:
    if not jax.tree.leaves(value):  # what a mask leaves out can't be in a ref
        entries["ref"] = False
    layout = (
        None if isinstance(value, _jax.Tracer) else getattr(value, "sharding", None)
    )
    is_on_mesh = (
        isinstance(layout, jax.sharding.NamedSharding) and not layout.mesh.empty
    )
    if not entries["eager_sharding"] or (
        _has_mesh(entries) and (is_apart or not is_on_mesh)
    ):
        return OptVariable(value, **entries)
    # State that is where its param is stays there, whatever its names mean now: they
    # may be logical ones, and their rules may be gone.
    if is_on_mesh and is_apart:
        value = sharding.place(value, {**entries, "mesh": value.sharding.mesh})
    variable = OptVariable(value, **{**entries, "eager_sharding": False})
    variable.set_metadata(eager_sharding=True)
    return variable


def _has_mesh(entries: Mapping[str, Any]) -> bool:
    """Whether there is a mesh for the annotation, or no annotation."""
    annotation = entries.get("out_sharding")
    return (
        not annotation
        or entries.get("mesh") is not None
        or isinstance(annotation, jax.sharding.NamedSharding)
        or not jax.sharding.get_abstract_mesh().empty
    )


class Optimizer(pytrees.Pytree, Generic[M]):
    """Keeps the state of an Optax transformation, and applies its steps to a model.

    Args:
        model: A Module, or any other node, State, dict or list that holds the leaves to
            optimize. It is only read.
        tx: An Optax gradient transformation. Masks and labels in it may be functions of
            the params, or trees: made by ``jax.tree.map`` from `nnx.state` or from the
            model, or nested dicts and lists; one value may stand for all below it.
        wrt: The filter that selects the leaves to optimize, usually ``nnx.Param``. It
            may also select arrays that are not in Variables.
        graph: Whether shared references are followed (graph mode). ``None`` means
            the default in force at each use.

    Attributes:
        step: Number of updates so far; uint32.
        opt_state: State of ``tx``, its leaves boxed by `to_opt_state`.
        tx: As given; static.
        wrt: As given; static.
        graph: As given; static.

    Raises:
        TypeError: If ``wrt`` is missing, or ``tx`` is not an Optax transformation.
        ValueError: If a Variable is shared, in tree mode, or if a mask or another tree
            in ``tx`` doesn't fit the params.

    Warns:
        UserWarning: If ``wrt`` selects nothing.

    Example:
        >>> import optax
        >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
        >>> optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
        >>> x, y = jnp.ones((8, 2)), jnp.ones((8, 1))
        >>> loss = lambda model: jnp.mean((model(x) - y) ** 2)
        >>> before = loss(model)
        >>> updates = optimizer.update(model, nnx.grad(loss)(model))
        >>> bool(loss(model) < before), optimizer.step[...].item()
        (True, 1)
    """

    # The form in which ``tx`` takes the params, if it is not the usual one.
    _form: str | None = None

    def __init__(
        self,
        model: M,
        tx: optax.GradientTransformation | optax.MultiSteps,
        *positional: Any,
        wrt: Filter = REQUIRED,
        graph: bool | None = None,
    ) -> None:
        if positional or wrt is REQUIRED:
            raise TypeError(
                "Missing required argument `wrt` of nnx.Optimizer: the filter that "
                "selects what to optimize, passed by keyword, e.g. "
                f"wrt=nnx.Param.\n{_OLD_USE}"
            )
        step_checks.check_transformation(tx)
        params = functional.state(model, wrt, graph=graph)
        step_checks.warn_of_nothing(params, wrt)
        self.graph = graph
        self.step = OptState(jnp.array(0, dtype=jnp.uint32))
        self.tx = tx
        form, opt_state = _init(tx, model, params, wrt)
        self.opt_state = attributes.data(opt_state)
        self.wrt = wrt
        if form is not None:
            self._form = form

    if not TYPE_CHECKING:  # A type checker would accept every attribute.

        def __getattr__(self, name: str) -> Any:
            reason = f"'{type(self).__name__}' object has no attribute {name!r}"
            if name == "model":
                reason = (
                    f"{type(self).__name__} does not have attribute 'model': it is "
                    f"passed to each update(model, grads).\n{_OLD_USE}"
                )
            raise AttributeError(reason, name=name, obj=self)

    @methods.named
    @arguments.own_arithmetic
    def update(
        self, model: M = REQUIRED, grads: Any = REQUIRED, /, **kwargs: Any
    ) -> Any:
        """Changes the model and the optimizer state in place by one step.

        The new values are written raw: no hook and no overridden ``set_value`` of a
        Variable runs.

        Args:
            model: The model, with the structure for which the optimizer was made.
            grads: A State, or any other node in which ``wrt`` selects the same paths as
                in ``model``; leaves that ``wrt`` does not select are ignored. Only if
                ``tx`` takes gradients of a part, as ``optax.lookahead`` does, those.
            **kwargs: Passed on to ``tx.update``, with Variables replaced by their
                values; e.g. ``value=``, ``grad=`` and ``value_fn=`` for L-BFGS.

        Returns:
            The updates that Optax added to the params: a State of arrays.

        Raises:
            TypeError: If ``grads`` is missing, or passed as the model.
            ValueError: If ``wrt`` selects other paths in ``grads`` than in ``model``,
                if a gradient differs from its parameter in shape or kind of number, if
                it is a parameter, or if the optimizer's state does not match. If ``tx``
                takes gradients per example, they may have one more axis in front.
            TraceContextError: If another trace owns the model or the optimizer.

        Example:
            >>> import optax
            >>> model = nnx.Dict(weight=nnx.Param(jnp.array(3.0)))
            >>> optimizer = nnx.Optimizer(model, optax.sgd(0.5), wrt=nnx.Param)
            >>> grads = nnx.State({"weight": nnx.Param(jnp.array(2.0))})
            >>> updates = optimizer.update(model, grads)
            >>> updates["weight"].item(), model.weight[...].item()
            (-1.0, 2.0)
        """
        model = _required("model", model, kwargs)
        grads = _required("grads", grads, kwargs)
        # Gradients are States, or have the form of the model and look like it.
        if isinstance(model, states.State) and isinstance(grads, pytrees.Pytree):
            raise step_checks.order_error(grads)
        params = _Boxes(functional.state(model, self.wrt, graph=self.graph))
        grads_state = functional.state(grads, self.wrt, graph=self.graph)
        step_checks.check_not_params(params.tree, grads_state)
        pure_grads = pure_dicts.as_pure(grads_state)
        selected = step_checks.selected_by(self.wrt)
        step_checks.check_gradients(params.pure, pure_grads, selected)
        opt_state = _Boxes(self.opt_state)
        try:
            updates, new_opt_state = self._call_optax(
                model, params, pure_grads, opt_state, kwargs
            )
        except Exception as error:
            step_checks.check_same_paths(params.pure, pure_grads, grads, selected)
            if isinstance(error, AttributeError):
                step_checks.note_missing_part(error, params.tree)
            if isinstance(error, (TypeError, ValueError)):
                first = functools.partial(self._first_state, model, params.tree)
                step_checks.explain_failure(first, opt_state.pure, error)
            raise
        updates = params.in_containers(updates)
        if jax.tree.structure(updates) != jax.tree.structure(params.pure):
            step_checks.check_same_paths(params.pure, pure_grads, grads, selected)
        step_checks.check_updates(params.pure, updates)
        new_params = params.keep_placement(apply_updates(params.pure, updates))
        new_opt_state = opt_state.keep_placement(new_opt_state)
        self._write(model, params, new_params, opt_state, new_opt_state)
        return updates

    def _call_optax(
        self,
        model: Any,
        params: _Boxes,
        grads: Any,
        opt_state: _Boxes,
        kwargs: dict[str, Any],
    ) -> tuple[Any, Any]:
        """Returns the updates and the new state, as values."""
        grads, values = map(params.beside_moments, (grads, params.pure))
        if self._form is None:
            kwargs = pure_dicts.as_pure(kwargs)
            return self.tx.update(grads, opt_state.pure, values, **kwargs)
        form = optax_forms.ParameterForm(self._form, model, params.tree)
        results = self.tx.update(
            form.into(grads),
            form.into(opt_state.tree, unboxed=OptArray),
            form.into(values),
            **form.into(kwargs),
        )
        return pure_dicts.as_pure(form.back(results))

    def _first_state(self, model: Any, params: Any) -> Any:
        """Returns the state with which ``tx`` would start now."""
        params = jax.tree.map(_read_ref, params, is_leaf=variables.is_variable)
        return pure_dicts.as_pure(optax_forms.start(self.tx, model, params)[1])

    def _write(
        self,
        model: Any,
        params: _Boxes,
        new_params: Any,
        opt_state: _Boxes,
        new_opt_state: Any,
    ) -> None:
        """Stores the results, after everything that can fail."""
        writes, bare_params = params.assign(new_params)
        state_writes, bare_state = opt_state.assign(new_opt_state)
        writes += [*state_writes, (self.step, pure_dicts.as_pure(self.step) + 1)]
        boxes, values = zip(*writes, strict=True)
        for variable in boxes:
            variables.check_write(variable)
        if bare_params is not None:
            arrays = states.filter_state(bare_params, filters.Not(variables.Variable))
            updates.update(model, arrays)
        if bare_state is not None:
            self.opt_state = bare_state
        variables.write_all(boxes, values)


def _init(
    tx: optax.GradientTransformation | optax.MultiSteps,
    model: Any,
    params: Any,
    wrt: Filter,
) -> tuple[str | None, Any]:
    """Finds the form that ``tx`` takes, and boxes its first state for the params."""
    params = jax.tree.map(_read_ref, params, is_leaf=variables.is_variable)
    try:
        form, opt_state = optax_forms.start(tx, model, params)
    except Exception as error:
        step_checks.explain_tree(params, error, wrt)
        raise
    is_state = isinstance(params, states.State)
    items = flat_states.leaves(params.raw_mapping) if is_state else [((), params)]
    values = {path: pure_dicts.as_pure(leaf) for path, leaf in items}
    # Copies of arrays that are also params, so that both can be donated together.
    param_ids = {id(leaf) for leaf in jax.tree.leaves(values)}
    opt_state = jax.tree.map(
        lambda x: jnp.copy(x) if id(x) in param_ids else x, opt_state
    )

    def box(jax_path: tuple, node: Any) -> Any:
        path = paths.from_jax(jax_path)
        if not isinstance(node, states.State):
            return _box_at(path, node, values.get(()))
        return states.map_state(
            lambda subpath, x: _box_at((*path, *subpath), x, values.get(subpath)), node
        )

    return form, jax.tree.map_with_path(
        box,
        opt_state,
        is_leaf=lambda x: isinstance(x, (states.State, variables.Variable)),
    )


def _box_at(path: Path, leaf: Any, param: Any) -> Any:
    """Boxes what Optax keeps at a path, for the param it belongs to, if any."""
    try:
        return jax.tree.map(
            lambda x: _box(x, param), leaf, is_leaf=variables.is_variable
        )
    except ValueError as error:
        error.add_note(
            f"This is the optimizer's {paths.to_string(path)}. Logical axis names need "
            "rules: make the optimizer within nnx.logical_axis_rules(rules)."
        )
        raise


def _read_ref(leaf: Any) -> Any:
    """Puts an array in place of the ref in a Variable: Optax cannot use refs."""
    if variables.is_variable(leaf) and _jax.is_ref(raw := leaf.get_raw_value()):
        return variables.rebuild(type(leaf), raw[...], variables.metadata_of(leaf))
    return leaf


def _required(name: str, argument: Any, kwargs: dict[str, Any]) -> Any:
    """Returns an argument of ``update``, which may also be passed by keyword."""
    if argument is not REQUIRED:
        return argument
    if name not in kwargs:
        raise TypeError(
            f"Missing required argument `{name}` of Optimizer.update: call "
            f"optimizer.update(model, grads).\n{_OLD_USE}"
        )
    return kwargs.pop(name)


class _Boxes:
    """A tree of Variables and bare leaves; ``pure`` holds their values."""

    def __init__(self, tree: Any) -> None:
        self.tree = tree
        self._leaves, self._treedef = jax.tree.flatten(
            tree, is_leaf=variables.is_variable
        )
        self.pure = self._treedef.unflatten(pure_dicts.as_pure(self._leaves))

    def beside_moments(self, pure: Any) -> Any:
        """Moves values of params or gradients to where the optimizer state is.

        The compiler does this on Auto axes. On Explicit ones, arrays that are divided
        in different ways can't be added.
        """
        if (
            AxisType.Explicit not in jax.sharding.get_abstract_mesh().axis_types
            or jax.tree.structure(pure) != jax.tree.structure(self.pure)
        ):
            return pure
        values = self._treedef.flatten_up_to(pure)
        return self._treedef.unflatten([*map(_beside_moments, self._leaves, values)])

    def keep_placement(self, pure: Any) -> Any:
        """Moves new values to where the old ones are; see `sharding.kept`."""
        new, old = map(self._treedef.flatten_up_to, (pure, self.pure))
        return self._treedef.unflatten([*map(_keep_placement, self._leaves, new, old)])

    def in_containers(self, pure: Any) -> Any:
        """Puts values into the containers of this tree: lookahead returns its own."""
        treedef = jax.tree.structure(self.pure)
        if jax.tree.structure(pure) == treedef:
            return pure
        leaves, others = map(step_checks.leaves_of, (self.pure, pure))
        if leaves.keys() != others.keys():
            return pure
        return treedef.unflatten(map(others.get, leaves))

    def assign(self, pure: Any) -> tuple[list[tuple[variables.Variable, Any]], Any]:
        """Returns Variables with their new values, and the tree with new bare leaves.

        The tree is ``None`` if there are no bare leaves.
        """
        pairs = [*zip(self._leaves, self._treedef.flatten_up_to(pure), strict=True)]
        boxed = [pair for pair in pairs if variables.is_variable(pair[0])]
        # Where a mask leaves out everything there is nothing to write, nor a ref.
        writes = [pair for pair in boxed if jax.tree.leaves(pair)]
        if len(boxed) == len(pairs):
            return writes, None
        rest = [leaf if variables.is_variable(leaf) else value for leaf, value in pairs]
        return writes, self._treedef.unflatten(rest)


def _beside_moments(leaf: Any, value: Any) -> Any:
    if not (variables.is_variable(leaf) and _is_apart(leaf)):
        return value
    entries = leaf.get_metadata()
    annotation = entries["optimizer_sharding"]
    return sharding.place(value, {**entries, "out_sharding": annotation})


def _keep_placement(leaf: Any, new: Any, old: Any) -> Any:
    """Keeps the placement of one leaf, whose value may be a pytree."""
    if jax.tree.structure(new) != jax.tree.structure(old):
        return new
    value = jax.tree.map(sharding.kept, new, old)
    if value is new or not (variables.is_variable(leaf) and _is_apart(leaf)):
        return value
    # Before the first step it may be anywhere: the compiler would place it like its
    # moments.
    spec = partitioning.get_var_pspec(leaf) or jax.sharding.PartitionSpec()
    layout = jax.sharding.NamedSharding(jax.sharding.get_abstract_mesh(), spec)
    return jax.lax.with_sharding_constraint(value, layout)


def _is_apart(variable: variables.Variable) -> bool:
    """Whether the moments of a param have their own sharding."""
    return variable.has_metadata("optimizer_sharding")


def apply_updates(params: Any, updates: Any) -> Any:
    """Adds updates to params as Optax does; each param keeps its dtype and sharding.

    Args:
        params: A pytree of arrays or Variables.
        updates: A pytree of the same structure.

    Returns:
        The new params.

    Example:
        >>> from graftree.training import optimizers
        >>> optimizers.apply_updates({"w": jnp.array(1.0)}, {"w": jnp.array(0.5)})
        {'w': Array(1.5, dtype=float32)}
    """
    beside = jax.tree.map(sharding.moved, updates, params, is_leaf=lambda x: x is None)
    return jax.tree.map(sharding.moved, optax.apply_updates(params, beside), params)


class ModelAndOptimizer(Optimizer[M]):
    """An `Optimizer` that keeps the model it trains.

    Deprecated in favor of `Optimizer`: a transform passes a model twice if it is in two
    of its arguments.

    Args:
        model: As for `Optimizer`; kept as the attribute ``model``, the same object.
        tx: As for `Optimizer`.
        wrt: As for `Optimizer`.

    Example:
        >>> import optax
        >>> model = nnx.Dict(weight=nnx.Param(jnp.array(3.0)))
        >>> optimizer = nnx.ModelAndOptimizer(model, optax.sgd(0.5))
        >>> grads = nnx.grad(lambda model: model.weight[...] ** 2)(model)
        >>> updates = optimizer.update(grads)
        >>> optimizer.model is model, model.weight[...].item()
        (True, 0.0)
    """

    def __init__(
        self,
        model: M,
        tx: optax.GradientTransformation | optax.MultiSteps,
        *,
        wrt: Filter = Param,
    ) -> None:
        super().__init__(model, tx, wrt=wrt)
        self.model = attributes.data(model)

    def update(self, grads: Any, /, **kwargs: Any) -> Any:
        """Changes the kept model and the optimizer state in place by one step.

        Args:
            grads: As for `Optimizer.update`.
            **kwargs: As for `Optimizer.update`.

        Returns:
            The updates that Optax added to the params: a State of arrays.

        Raises:
            ValueError: If ``wrt`` selects other paths in ``grads`` than in the model.
        """
        return super().update(self.model, grads, **kwargs)
