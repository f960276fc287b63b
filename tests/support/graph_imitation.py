"""CUDA graphs imitated on a CPU: a graph reads and writes static memory."""

import os
import signal
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from tapscope.engine.execution import decode_graphs, model_runner, prefill_graphs
from tapscope.engine.execution.decode_graphs import CapturedGraph, DecodeGraphs
from tapscope.engine.execution.prefill_graphs import PrefillGraphs
from tapscope.engine.layers import paged_attention
from tapscope.engine.requests.step_plan import StepPlan
from tapscope.kernels.cpu.paged import paged_reference


class Imitation:
    """A graph whose replay recomputes everything and writes to the memory of the first computation."""

    def __init__(self, compute: Callable[[], list[Tensor]]) -> None:
        self._compute, self.values = compute, [value.clone() for value in compute()]

    def replay(self) -> None:
        for value, again in zip(self.values, self._compute(), strict=True):
            value.copy_(again)

    def reset(self) -> None:
        """Release the computation."""
        self._compute = list


def imitated(self: DecodeGraphs, size: int, observer: Any = None, *, is_alone: bool = False) -> CapturedGraph:
    def compute() -> list[Tensor]:
        hidden = self._decode(self._inputs(size), None)
        return [hidden, *(each for value in held_values() for each in listed(value))]

    def held_values() -> list[Any]:
        return [getattr(module, name) for module, name in self._holders]

    def listed(value: Any) -> list[Tensor]:
        return value if isinstance(value, list) else [] if value is None else [value]

    self._load_padding(size)
    with self._model.tp.rehearsal() if is_alone else nullcontext():
        graph: Any = Imitation(compute)
    hidden, *others = graph.values
    held = []
    for (module, name), value in zip(self._holders, held_values(), strict=True):
        own, others = others[: len(listed(value))], others[len(listed(value)) :]
        held.append((module, name, own if isinstance(value, list) else own[0] if own else None))
    return CapturedGraph(graph, self._inputs(size), hidden, tuple(held))


def imitate_graphs(monkeypatch: pytest.MonkeyPatch) -> list[StepPlan]:
    """Give engines created from now on imitated graphs, unless their settings forbid it; return the steps run by
    graphs."""
    found: list[StepPlan] = []

    def counted(run: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
        def counting(self: DecodeGraphs, plan: StepPlan, *inputs: Any) -> Tensor | None:
            hidden = run(self, plan, *inputs)
            found.extend([] if hidden is None else [plan])
            return hidden

        return counting

    wants = lambda config, model, cache, device: config.cuda_graphs != "off"  # noqa: E731
    monkeypatch.setattr(model_runner, "can_capture_graphs", wants)
    monkeypatch.setattr(paged_attention, "paged_attention", paged_reference)  # reads lengths from the buffers
    monkeypatch.setattr(DecodeGraphs, "_capture", imitated)
    for kind in (DecodeGraphs, PrefillGraphs):
        monkeypatch.setattr(kind, "run", counted(kind.run))
    monkeypatch.setattr(decode_graphs.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(decode_graphs.cuda, "Stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 30, 1 << 31))
    return found


def imitate_prefill_graphs(monkeypatch: pytest.MonkeyPatch) -> list[StepPlan]:
    """As :func:`imitate_graphs`, also for prefill steps of up to 64 tokens; requires Triton's attention references."""
    monkeypatch.setattr(paged_attention, "_triton", lambda: paged_attention._Kernels(_decode, _prefill))
    monkeypatch.setattr(prefill_graphs, "_SIZES", (4, 16, 24, 64))
    return imitate_graphs(monkeypatch)


def _decode(query: Tensor, *args: Any, num_active: Tensor, out: Tensor, stored_scales: Any, **features: Any) -> None:
    """Decode attention that fills the rows of inactive requests with NaN, because no code may read them."""
    from tapscope.kernels.triton.paged_decode import paged_decode_reference

    out[:] = torch.nan
    keys, values, table, lengths, scale = args
    some = slice(int(num_active))
    assert (lengths[some] > 0).all()
    assert not lengths[int(num_active) :].any()
    if num_active:
        out[some] = paged_decode_reference(query[some], keys, values, table[some], lengths[some], scale, **features)


def _prefill(query: Tensor, *args: Any, num_prompts: int, out: Tensor, stored_scales: Any, **features: Any) -> Tensor:
    from tapscope.kernels.triton.paged_prefill import paged_prefill_reference

    first = int(args[3][0])
    out[first:] = paged_prefill_reference(query, *args, **features)[first:]
    return out


class Imitating:
    """Observer factory for each rank; spawned ranks imitate graphs as well."""

    def __init__(self, make: Callable[[Any, Any], Any]) -> None:
        self._make = make

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Install the imitation in the process of another rank, before its engine is created."""
        self.__dict__.update(state)
        imitate_prefill_graphs(pytest.MonkeyPatch())

    def __call__(self, model: Any, info: Any) -> Any:
        """Create an observer, see :class:`tapscope.core.observe.ObserverFactory`."""
        return self._make(model, info)


class KilledInRank1:
    """Observer factory that kills rank 1 at its second CUDA graph, which is only a measurement on a GPU.

    Without a GPU, both ranks imitate graphs.
    """

    def __init__(self, *, imitates: bool) -> None:
        self._imitates = imitates

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Install the kill in the process of rank 1, before its engine is created."""
        self.__dict__.update(state)
        if self._imitates:
            imitate_prefill_graphs(pytest.MonkeyPatch())
        capture, captured = DecodeGraphs._capture, []

        def killing(*args: Any, **kwargs: Any) -> CapturedGraph:
            if captured:
                os.kill(os.getpid(), signal.SIGKILL)
            captured.append(capture(*args, **kwargs))
            return captured[0]

        DecodeGraphs._capture = killing  # type: ignore[method-assign]

    def __call__(self, model: Any, info: Any) -> Any:
        raise AssertionError("the engine cannot have started")
