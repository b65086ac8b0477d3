"""Adds up the costs of a compiled program: of modules, of collectives, of the whole."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

import numpy as np

from graftree.forecast import costs, scopes, traffic
from graftree.forecast.hlo import Computation, Instruction, Program
from graftree.forecast.reports import Costs, Work
from graftree.forecast.scopes import Scope
from graftree.forecast.targets import Target
from graftree.forecast.traffic import Traffic


def costs_of(program: Program, target: Target, mesh: Any) -> Costs:
    """Adds up what one device does in a program.

    Args:
        program: The program.
        target: What it is compiled for.
        mesh: Its devices; ``None`` for one.
    """
    sums = _Sums(program, target, mesh)
    for computation, count in program.runs():
        sums.add(computation, count)
    return Costs(
        modules={scope: work for scope, work in sums.modules.items() if work},
        traffic=dict(sums.traffic),
        bounds=sums.bounds(),
        unknown=dict(sums.unknown),
        unknown_loops=program.unknown_loops,
    )


class _Sums:
    """Sums over the computations of a program; the arguments are those of `costs_of`.

    Attributes:
        modules: The work of each scope.
        traffic: What is sent, by kind of collective and axes.
        unknown: Calls of functions whose operations can't be counted.
        seconds: Time of all products at the peak of the matrix units.
        sent: What is sent, and how often.
    """

    def __init__(self, program: Program, target: Target, mesh: Any) -> None:
        self.program, self.accelerator = program, target.accelerator
        self.sizes: Mapping[str, int] = {} if mesh is None else dict(mesh.shape)
        devices = target.devices[:1] if mesh is None else [*mesh.devices.flat]
        self.hosts = np.array([target.host(device) for device in devices])
        self.modules = collections.defaultdict[Scope, Work](Work)
        self.traffic = collections.defaultdict[Any, Traffic](Traffic)
        self.unknown = collections.Counter[str]()
        self.seconds = 0.0
        self.sent: list[tuple[traffic.Sent, int]] = []

    def add(self, computation: Computation, count: int) -> None:
        """Adds what a computation does in so many runs."""
        scope_by_name = scopes.scopes_of(computation)
        for name, instruction in computation.items():
            work = self.modules[scope_by_name[name]]
            work.bytes += count * costs.num_bytes(
                self.program, computation, instruction
            )
            work.largest = max(work.largest, costs.largest(instruction))
            self._add_products(computation, instruction, scope_by_name[name], count)
        for item in traffic.exchanges(self.program, computation):
            scope = scope_by_name.get(item.instruction.name, Scope())
            self.modules[scope].sent += count * item.sent
            axes = item.axes(self.sizes) if self.sizes else ()
            num_bytes = count * item.num_bytes
            self.traffic[item.kind, axes].add(count, num_bytes, count * item.sent)
            self.sent.append((item, count))

    def _add_products(
        self, computation: Computation, instruction: Instruction, scope: Scope, n: int
    ) -> None:
        for product in costs.products(self.program, computation, instruction):
            if product.count is None:
                self.unknown[product.instruction.target] += n
                continue
            own_scope = scopes.scope_of(product.instruction.op_name)
            self.modules[own_scope if own_scope.path else scope].flops += (
                n * product.count
            )
            if self.accelerator is not None:
                self.seconds += n * product.count / self.accelerator.peak(product.bits)

    def bounds(self) -> dict[str, float]:
        """Returns the least seconds for each resource; none where no figures are."""
        accelerator = self.accelerator
        if accelerator is None:
            return {}
        num_bytes = sum([work.bytes for work in self.modules.values()])
        links = accelerator.link, accelerator.host_link
        return {
            "compute": self.seconds,
            "memory": num_bytes / accelerator.memory_bandwidth,
            "network": traffic.seconds(self.sent, self.hosts, *links),
        }
