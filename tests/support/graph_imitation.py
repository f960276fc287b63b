"""CUDA graphs that a CPU imitates: what a graph reads and writes is in static memory."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tapscope.engine.execution import cuda_graphs
from tapscope.engine.execution.cuda_graphs import CapturedGraph, DecodeGraphs
from tapscope.engine.execution.model_runner import ModelRunner
from tapscope.engine.execution.prefill_graphs import PrefillGraphs
from tapscope.engine.layers import paged_attention
from tapscope.engine.requests.step_plan import StepPlan
from tapscope.kernels.cpu.paged import paged_reference


class Imitation:
    """A graph whose replay computes everything again and writes it where the first computation did."""

    def __init__(self, compute: Callable[[], list[Tensor]]) -> None:
        self._compute, self.values = compute, [value.clone() for value in compute()]

    def replay(self) -> None:
        for value, again in zip(self.values, self._compute(), strict=True):
            value.copy_(again)

    def reset(self) -> None:
        """Forget how."""
        self._compute = list


def imitated(self: DecodeGraphs, size: int, observer: Any = None) -> CapturedGraph:
    def compute() -> list[Tensor]:
        hidden = self._decode(self._inputs(size), None)
        return [hidden, *(each for value in held_values() for each in listed(value))]

    def held_values() -> list[Any]:
        return [getattr(module, name) for module, name in self._holders]

    def listed(value: Any) -> list[Tensor]:
        return value if isinstance(value, list) else [] if value is None else [value]

    self._load_padding(size)
    graph: Any = Imitation(compute)
    hidden, *others = graph.values
    held = []
    for (module, name), value in zip(self._holders, held_values(), strict=True):
        own, others = others[: len(listed(value))], others[len(listed(value)) :]
        held.append((module, name, own if isinstance(value, list) else own[0] if own else None))
    return CapturedGraph(graph, self._inputs(size), hidden, tuple(held))


def imitate_graphs(monkeypatch: pytest.MonkeyPatch) -> list[StepPlan]:
    """Engines made from now on have graphs, unless their settings forbid it; gives the steps that graphs compute."""
    found: list[StepPlan] = []

    def counted(run: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
        def counting(self: DecodeGraphs, plan: StepPlan, extra: Any = None) -> Tensor | None:
            hidden = run(self, plan, extra)
            found.extend([] if hidden is None else [plan])
            return hidden

        return counting

    wants = lambda self, config: config.cuda_graphs != "off"  # noqa: E731
    monkeypatch.setattr(ModelRunner, "_can_capture_graphs", wants)
    monkeypatch.setattr(paged_attention, "paged_attention", paged_reference)  # reads lengths from the buffers
    monkeypatch.setattr(DecodeGraphs, "_record", imitated)
    for kind in (DecodeGraphs, PrefillGraphs):
        monkeypatch.setattr(kind, "run", counted(kind.run))
    monkeypatch.setattr(cuda_graphs.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(cuda_graphs.cuda, "Stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 30, 1 << 31))
    return found
