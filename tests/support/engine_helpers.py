"""Helpers of the engine's tests: ranks as threads, and reference outputs of transformers."""

import functools
import itertools
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from engine_observers import Memory
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from tapscope.core.wire import decode, encode
from tapscope.engine.distributed.tensor_parallel import TensorParallel
from tapscope.engine.execution.model_runner import ModelRunner
from tapscope.engine.hf_config.model_config import ModelConfig
from tapscope.engine.params.engine_config import EngineConfig
from tapscope.engine.params.sampling_params import SamplingParams
from tapscope.engine.requests.request import Request
from tapscope.engine.requests.step_plan import StepPlan
from tapscope.engine.scheduling.scheduler import Scheduler
from tapscope.engine.scheduling.scheduler_config import SchedulerConfig

torch.set_num_threads(1)


@functools.cache
def reference(path: Path) -> PreTrainedModel:
    """Load the model in transformers, in the dtype of the checkpoint."""
    has_vision = "vision_config" in (path / "config.json").read_text(encoding="utf-8")
    auto_class: Any = AutoModelForImageTextToText if has_vision else AutoModelForCausalLM
    model: PreTrainedModel = auto_class.from_pretrained(path, dtype="auto").eval()
    if getattr(model.config, "attn_logit_softcapping", None):  # sdpa would ignore it
        model.set_attn_implementation("eager")
    return model


def reference_tokens(path: Path, prompt: Sequence[int], count: int) -> list[int]:
    """Return transformers' greedy continuation, ignoring end-of-sequence tokens."""
    ids = torch.tensor([prompt])
    output = reference(path).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return output[0, len(prompt) :].tolist()


@torch.no_grad()
def reference_logits(path: Path, tokens: Sequence[int]) -> Tensor:
    """Return transformers' logits, [tokens, vocab]."""
    return reference(path)(torch.tensor([tokens])).logits[0]


class ThreadGroup:
    """Replacement for gloo process groups, one per rank, for ranks that are threads.

    Tensors are exchanged in memory and added in rank order. Gloo's sockets and threads take three times the CPU time of
    two ranks' steps, and ten times that of four.
    """

    def __init__(self, size: int) -> None:
        self._barrier, self._given = threading.Barrier(size, timeout=20), [[torch.empty(0)] * size for _ in range(2)]

    def of(self, rank: int) -> SimpleNamespace:
        """Return the methods of its group that :class:`TensorParallel` calls, for one rank."""
        turns = itertools.count()

        def exchange(own: Tensor) -> list[Tensor]:
            given = self._given[next(turns) % 2]  # double-buffered: a rank may be one turn ahead
            given[rank] = own.clone()
            self._barrier.wait()
            return given

        def allreduce(tensors: list[Tensor], options: Any) -> None:
            first, *others = exchange(tensors[0])
            tensors[0].copy_(sum(others, start=first))

        def allgather(outputs: list[list[Tensor]], tensors: list[Tensor], options: Any) -> None:
            for output, part in zip(outputs[0], exchange(tensors[0]), strict=True):
                output.copy_(part)

        return SimpleNamespace(allreduce=allreduce, allgather=allgather)


class ThreadRanks:
    """An engine whose ranks are threads of this process: real plans, no time spent on spawning; real gloo if
    requested."""

    def __init__(self, path: Path, store: Path, tp: int, *, gloo: bool = False, **settings: Any) -> None:
        self._group = None if gloo or tp == 1 else ThreadGroup(tp)
        self.config = EngineConfig(model=str(path), tp=tp, logits="all", **{"prefix_cache": False} | settings)
        self.model_config = ModelConfig.read(path)
        self._pool = ThreadPoolExecutor(tp)
        self.runners = list(self._pool.map(lambda rank: self._build(store, rank), range(tp)))
        self.scheduler = Scheduler(self._policy(self.runners[0]))

    def _policy(self, runner: ModelRunner) -> SchedulerConfig:
        return SchedulerConfig(
            num_pages=runner.cache_config.num_pages,
            page_size=self.config.page_size,
            max_num_seqs=8,
            max_tokens=runner.max_tokens,
            windowed_pools=runner.cache_config.windowed_pools,
            num_state_slots=runner.cache_config.num_state_slots,
            num_adapter_slots=self.config.max_loras_per_batch,
            state_interval=self.config.state_checkpoint_interval,
            prefix_cache=self.config.prefix_cache,
            check_invariants=True,
        )

    def _build(self, store: Path, rank: int) -> ModelRunner:
        if self.config.tp == 1:
            tp = TensorParallel()
        elif self._group is None:
            tp = TensorParallel.connect(store, rank, self.config.tp, 20)
        else:
            tp = TensorParallel(rank, self.config.tp, self._group.of(rank))
        return ModelRunner(self.config, self.model_config, tp, Memory)

    def generate(
        self, prompts: Sequence[Sequence[int]], count: int, adapters: Sequence[int] | None = None
    ) -> list[Request]:
        """Generate for all prompts; ``adapters`` are the numbers of loaded LoRA adapters, 0 for none."""
        requests = [
            Request(id=str(i), prompt_ids=tuple(prompt), params=SamplingParams(max_new_tokens=count))
            for i, prompt in enumerate(prompts)
        ]
        for request, number in zip(requests, adapters or [0] * len(requests), strict=True):
            request.adapter_id, request.adapter = number, str(number or "")
        for request in requests:
            self.scheduler.validate(request)
            self.scheduler.add(request)
        while self.scheduler.has_work:
            plan = self.scheduler.plan(all_logits=True, epoch=None)
            tokens = list(self._pool.map(lambda runner, plan=plan: _compute(runner, plan), self.runners))
            assert all(other == tokens[0] for other in tokens), "ranks sampled different tokens"
            self.scheduler.commit(tokens[0])
        return requests

    def close(self) -> None:
        self._pool.shutdown()
        self.runners.clear()


def _compute(runner: ModelRunner, plan: StepPlan) -> list[int]:
    received = StepPlan.from_message(decode(encode(plan.to_message())))
    tokens = runner.execute(received)
    runner.finish(received)
    return tokens


def compare_logits(
    path: Path, tp: int, prompts: Sequence[Sequence[int]], num_new: int, **settings: Any
) -> tuple[list[Request], float]:
    """Return the requests, and the largest difference of their logits from transformers', over positions and ranks.

    transformers computes every sequence in one uncached forward. Raises AssertionError if a token is not transformers'
    greedy choice given the previous tokens.
    """
    ranks = ThreadRanks(path, path.parent / "store", tp, **{"page_size": 4} | settings)
    requests = ranks.generate(prompts, num_new)
    largest = 0.0
    for request in requests:
        expected = reference_logits(path, request.tokens[:-1])
        assert list(request.generated) == expected.argmax(-1)[-num_new:].tolist()
        for runner in ranks.runners:
            actual = runner.observer.logits_of(request.id)
            assert actual.shape == expected.shape
            difference = float((actual - expected).abs().max())
            assert difference == difference, "a logit is NaN"
            largest = max(largest, difference)
    ranks.close()
    return requests, largest


def check_parity(path: Path, tp: int, prompts: Sequence[Sequence[int]], num_new: int, **settings: Any) -> list[Request]:
    """Return the requests of :func:`compare_logits`; a difference above 1e-4 fails."""
    requests, difference = compare_logits(path, tp, prompts, num_new, **settings)
    assert difference <= 1e-4
    return requests
