"""ModelRunner, ForwardBatch and a Llama as in SGLang: the root module returns the logits of its last rows."""

from dataclasses import dataclass, field
from enum import IntEnum, auto
from types import SimpleNamespace
from typing import Any

import torch
from vllm_like import LogitsProcessor as Head
from vllm_like import VllmLlama

import sglang.srt.distributed.parallel_state  # noqa: F401 - SGLang imports it, too


class ForwardMode(IntEnum):
    EXTEND = auto()
    DECODE = auto()
    IDLE = auto()

    def is_decode(self) -> bool:
        return self is ForwardMode.DECODE

    def is_idle(self) -> bool:
        return self is ForwardMode.IDLE


@dataclass
class ForwardBatch:
    forward_mode: ForwardMode
    input_ids: torch.Tensor
    seq_lens: torch.Tensor
    req_pool_indices: torch.Tensor
    extend_seq_lens_cpu: list[int] | None = None
    extend_prefix_lens_cpu: list[int] | None = None
    rids: list[str] | None = None
    kv_cache: list[torch.Tensor] = field(default_factory=lambda: [torch.zeros(4)])


@dataclass
class LogitsProcessorOutput:
    next_token_logits: torch.Tensor
    hidden_states: torch.Tensor | None = None


class LogitsProcessor(Head):
    def forward(self, input_ids: Any, hidden_states: Any, lm_head: Any, batch: ForwardBatch) -> Any:
        last = torch.cumsum(torch.tensor(batch.extend_seq_lens_cpu), 0) - 1
        return LogitsProcessorOutput(super().forward(lm_head, hidden_states[last]))


class LlamaForCausalLM(VllmLlama):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.logits_processor = LogitsProcessor()

    def forward(self, input_ids: Any, positions: Any, forward_batch: ForwardBatch) -> Any:
        hidden = self.model(input_ids, positions)
        return self.logits_processor(input_ids, hidden, self.lm_head, forward_batch)


class ModelRunner:
    is_draft_worker = False

    def __init__(self, config: Any, weights: dict[str, torch.Tensor]) -> None:
        self.server_args = SimpleNamespace(disable_cuda_graph=True)
        self._config, self._weights = config, weights

    def load_model(self) -> None:
        self.model = LlamaForCausalLM(self._config).load(self._weights)

    def extend(self, name: str, tokens: list[int]) -> Any:
        """Return a batch of one full prompt."""
        ids = torch.tensor(tokens)
        batch = ForwardBatch(
            ForwardMode.EXTEND,
            ids,
            torch.tensor([len(tokens)]),
            torch.tensor([0]),
            extend_seq_lens_cpu=[len(tokens)],
            extend_prefix_lens_cpu=[0],
            rids=[name],
        )
        with torch.inference_mode():
            return self.model.forward(ids, torch.arange(len(tokens)), batch)
