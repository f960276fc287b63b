"""LoraAdapters: one rank's LoRA adapters: loaded ones in host memory, placed ones in slots on the device."""

from pathlib import Path

import numpy as np
import torch

from tapscope.core.errors import CheckpointError
from tapscope.engine.checkpoint.peft_adapter import PeftAdapter
from tapscope.engine.execution.adapter_reader import AdapterReader
from tapscope.engine.layers.experts import Experts
from tapscope.engine.layers.linear import Linear
from tapscope.engine.layers.lora import (
    AdapterBatch,
    AdapterMatrices,
    AdapterRows,
    ExpertsLora,
    LoraLayer,
    LoraTarget,
    expert_targets,
    lora_targets,
)
from tapscope.engine.models.decoder import CausalLM
from tapscope.engine.requests.step_plan import StepPlan

_RANK_MULTIPLE = 8  # alignment that grouped GEMMs require of the padded matrices' rows


class LoraAdapters:
    """LoRA adapters of one model on one rank; rank 0 decides which are loaded and placed."""

    def __init__(self, model: CausalLM, num_slots: int, max_rank: int, dtype: torch.dtype) -> None:
        """Create the targets of the linear layers and experts of ``model``; their sites become modules of the model."""
        self._model, self._num_slots, self._dtype = model, num_slots, dtype
        self._rank = -(-max_rank // _RANK_MULTIPLE) * _RANK_MULTIPLE
        self._max_rank = max_rank
        self._batch = AdapterBatch()
        self._targets: dict[str, LoraTarget] = {}
        self._loaded: dict[int, dict[str, AdapterMatrices]] = {}
        for path, module in list(model.named_modules()):
            if isinstance(module, Linear) and module.may_have_adapters:
                targets = list(lora_targets(model, module, list(module.weight_slices(path))))
                module.lora = LoraLayer(targets, self._batch)
                self._targets |= {target.path: target for target in targets}
            elif isinstance(module, Experts):
                stacks = expert_targets(model, module, path)
                module.lora = ExpertsLora(stacks, num_slots, self._batch)
                self._targets |= {target.path: target for target in stacks.values()}
        self._reader = AdapterReader(model, self._targets, dtype)

    def load(self, number: int, folder: Path) -> None:
        """Read this rank's shard of the adapter in ``folder`` under the id ``number``; raises CheckpointError."""
        adapter = PeftAdapter.read(folder)
        if adapter.rank > self._max_rank:
            raise CheckpointError(
                f"{folder} has rank {adapter.rank}, but max_lora_rank is {self._max_rank}; raise max_lora_rank"
            )
        with adapter.open() as weights:
            self._loaded[number] = self._reader.read(adapter, weights)

    def drop(self, number: int) -> None:
        """Unload an adapter; a slot that holds the adapter keeps it until another one is placed there."""
        self._loaded.pop(number, None)

    @torch.no_grad()
    def begin(self, plan: StepPlan) -> None:
        """Place the adapters that ``plan`` requests, and set the adapted rows for the layers."""
        device = next(self._model.parameters()).device
        like = torch.empty(0, dtype=self._dtype, device=device)
        for slot, number in plan.adapter_loads:
            adapter = self._loaded[number]
            for path, target in self._targets.items():
                target.place(slot, adapter.get(path), self._num_slots, self._rank, like)
        self._batch.rows = self._rows(plan, device) if plan.has_adapters else None

    def end(self) -> None:
        """Clear the adapted rows of the last step, so that later steps run without adapters."""
        self._batch.rows = None

    def _rows(self, plan: StepPlan, device: torch.device) -> AdapterRows:
        slots, rows = np.array(plan.adapter_rows, dtype=np.int64).T
        ends = np.cumsum(np.bincount(slots, minlength=self._num_slots)).astype(np.int32)
        is_all = len(rows) == plan.num_tokens and bool((rows == np.arange(len(rows))).all())
        return AdapterRows(
            rows=None if is_all else torch.tensor(rows, device=device),
            ends=torch.tensor(ends, device=device),
            slots=torch.tensor(slots, device=device),
            active=tuple(map(int, np.unique(slots))),
        )
