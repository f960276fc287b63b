"""vLLM's worker around the Llama of :mod:`vllm_like`: everything the plugin touches has vLLM's names (v0.32,
v1/worker).

``install(monkeypatch)`` makes it importable as ``vllm``. The two model runners of vLLM differ in where they keep the
batch and where they compute logits. Contains no tests.
"""

import sys
import types
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm_like import VllmLlama


@dataclass
class SchedulerOutput:
    num_scheduled_tokens: dict[str, int]
    finished_req_ids: set[str] = field(default_factory=set)
    scheduled_spec_decode_tokens: dict[str, list[int]] = field(default_factory=dict)

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


class LlamaForCausalLM(VllmLlama):
    """A model whose module is in the package ``vllm``."""

    def forward(
        self, input_ids: Any, positions: Any, intermediate_tensors: Any = None, inputs_embeds: Any = None
    ) -> Any:
        return super().forward(input_ids, positions)


LlamaForCausalLM.__module__ = "vllm.model_executor.models.llama"


@dataclass
class Requests:
    """Token ids of the running requests, and the number of computed tokens of each."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    computed: dict[str, int] = field(default_factory=dict)

    def packed(self, scheduled: SchedulerOutput, order: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        ids, positions = list[int](), list[int]()
        for name in order:
            first = self.computed.get(name, 0)
            last = first + scheduled.num_scheduled_tokens[name]
            ids += self.tokens[name][first:last]
            positions += range(first, last)
        return torch.tensor(ids), torch.tensor(positions)

    def advance(self, scheduled: SchedulerOutput) -> None:
        for name, count in scheduled.num_scheduled_tokens.items():
            self.computed[name] = self.computed.get(name, 0) + count


class FirstRunner:
    """vLLM's first model runner: logits in ``execute_model``, the batch in ``input_batch``."""

    def __init__(self, model: LlamaForCausalLM, requests: Requests) -> None:
        self.model, self.running = model, requests
        self.input_batch = SimpleNamespace(req_ids=[], num_computed_tokens_cpu=np.zeros(0, np.int32))

    def get_model(self) -> LlamaForCausalLM:
        return self.model

    def _dummy_run(self, count: int) -> None:
        self.model(input_ids=torch.zeros(count, dtype=torch.long), positions=torch.arange(count))

    def execute_model(self, scheduled: SchedulerOutput) -> Any:
        order = sorted(scheduled.num_scheduled_tokens, key=lambda name: scheduled.num_scheduled_tokens[name])
        ids, positions = self.running.packed(scheduled, order)
        computed = [self.running.computed.get(name, 0) for name in order]
        self.input_batch = SimpleNamespace(req_ids=order, num_computed_tokens_cpu=np.array(computed, np.int32))
        hidden = self.model(input_ids=ids, positions=positions, intermediate_tensors=None, inputs_embeds=None)
        last = np.cumsum([scheduled.num_scheduled_tokens[name] for name in order]) - 1
        self.logits = self.model.compute_logits(hidden[torch.as_tensor(last)])
        self.running.advance(scheduled)

    def sample_tokens(self, grammar: Any) -> torch.Tensor:
        return self.logits.argmax(-1)


class SecondRunner(FirstRunner):
    """vLLM's second model runner: logits in ``sample_tokens``, the batch in the result of ``prepare_inputs``."""

    def prepare_inputs(self, scheduled: SchedulerOutput) -> Any:
        order = sorted(scheduled.num_scheduled_tokens)
        counts = [scheduled.num_scheduled_tokens[name] for name in order]
        computed = [self.running.computed.get(name, 0) for name in order]
        return SimpleNamespace(
            req_ids=order, num_scheduled_tokens=np.array(counts), num_computed_tokens_np=np.array(computed)
        )

    def execute_model(self, scheduled: SchedulerOutput) -> Any:
        batch = self.prepare_inputs(scheduled)
        ids, positions = self.running.packed(scheduled, batch.req_ids)
        hidden = self.model(input_ids=ids, positions=positions, inputs_embeds=None, intermediate_tensors=None)
        self.hidden = hidden[torch.as_tensor(np.cumsum(batch.num_scheduled_tokens) - 1)]
        self.running.advance(scheduled)

    def sample_tokens(self, grammar: Any) -> torch.Tensor:
        return self.model.compute_logits(self.hidden).argmax(-1)


class Worker:
    def __init__(self, model: LlamaForCausalLM, requests: Requests, runner: type[FirstRunner]) -> None:
        self.model_config = SimpleNamespace(enforce_eager=True)
        self.parallel_config = SimpleNamespace(enable_expert_parallel=False)
        self._build = lambda: runner(model, requests)
        self.model_runner: Any = None

    def init_device(self) -> None:
        pass

    def load_model(self) -> None:
        self.model_runner = self._build()

    def compile_or_warm_up_model(self) -> None:
        self.model_runner._dummy_run(4)

    @torch.inference_mode()
    def execute_model(self, scheduled: SchedulerOutput) -> Any:
        return self.model_runner.execute_model(scheduled) if scheduled.num_scheduled_tokens else object()

    @torch.inference_mode()
    def sample_tokens(self, grammar: Any) -> Any:
        return self.model_runner.sample_tokens(grammar)

    def execute_dummy_batch(self) -> None:
        self.model_runner._dummy_run(1)

    def shutdown(self) -> None:
        pass


class WorkerWrapperBase:
    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def init_device(self) -> None:
        self.worker.init_device()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.worker, name)

    def execute_model(self, scheduled: SchedulerOutput) -> Any:
        return self.worker.execute_model(scheduled)


def install(monkeypatch: pytest.MonkeyPatch, *, tp: int = 1, rank: int = 0) -> type[WorkerWrapperBase]:
    """Make the stand-in importable as ``vllm``; return a new wrapper class, which the plugin may patch."""
    wrapper = type("WorkerWrapperBase", (WorkerWrapperBase,), {"init_device": WorkerWrapperBase.init_device})
    group = SimpleNamespace(world_size=tp, rank_in_group=rank)
    one = SimpleNamespace(world_size=1, rank_in_group=0)
    contents: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": "0.32.0"},
        "vllm.envs": {"VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": False},
        "vllm.distributed": {},
        "vllm.distributed.parallel_state": {
            "get_tp_group": lambda: group,
            "get_pp_group": lambda: one,
            "get_dp_group": lambda: one,
        },
        "vllm.v1": {},
        "vllm.v1.worker": {},
        "vllm.v1.worker.worker_base": {"WorkerWrapperBase": wrapper},
    }
    for name, members in contents.items():
        module = types.ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    return wrapper
