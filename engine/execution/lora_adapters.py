"""LoraAdapters: one rank's LoRA adapters: those loaded, in host memory, and those in slots, for the steps."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from tapscope.core.errors import CheckpointError
from tapscope.engine.checkpoint.checkpoint import renamed
from tapscope.engine.checkpoint.peft_adapter import AdapterWeights, PeftAdapter
from tapscope.engine.layers.experts import Experts
from tapscope.engine.layers.linear import Linear
from tapscope.engine.layers.lora import (
    AdapterBatch,
    AdapterMatrices,
    AdapterRows,
    LoraLayer,
    LoraTarget,
    lora_targets,
)
from tapscope.engine.models.decoder import CausalLM
from tapscope.engine.requests.step_plan import StepPlan

_RANK_MULTIPLE = 8  # rows of the padded matrices are aligned as grouped GEMMs require


@dataclass(frozen=True, slots=True)
class _Placed:
    """A target and the weight of its layer, for the device."""

    target: LoraTarget
    layer: Linear


class LoraAdapters:
    """The adapters of one model on one rank; rank 0 decides which are loaded and placed."""

    def __init__(self, model: CausalLM, num_slots: int, max_rank: int, dtype: torch.dtype) -> None:
        """Give every linear layer of ``model`` its targets, whose sites become modules of the model."""
        self._model, self._num_slots, self._dtype = model, num_slots, dtype
        self._rank = -(-max_rank // _RANK_MULTIPLE) * _RANK_MULTIPLE
        self._max_rank = max_rank
        self._batch = AdapterBatch()
        self._targets: dict[str, _Placed] = {}
        self._loaded: dict[int, dict[str, AdapterMatrices]] = {}
        for path, module in list(model.named_modules()):
            if isinstance(module, Linear) and module.may_stay_quantized:
                targets = list(lora_targets(model, module, list(module.weight_slices(path))))
                module.lora = LoraLayer(targets, self._batch)
                self._targets |= {target.path: _Placed(target, module) for target in targets}

    def load(self, number: int, folder: Path) -> None:
        """Read this rank's part of the adapter in ``folder`` under the id ``number``; raises CheckpointError."""
        adapter = PeftAdapter.read(folder)
        if adapter.rank > self._max_rank:
            raise CheckpointError(
                f"{folder} has rank {adapter.rank}, but max_lora_rank is {self._max_rank}; raise max_lora_rank"
            )
        with adapter.open() as weights:
            prefixes = self._model.checkpoint_prefixes
            targets = {path: self._target(renamed(path, prefixes), path, weights) for path in weights.names}
            self._loaded[number] = {
                target.path: self._read(weights, path, target, adapter) for path, target in targets.items()
            }

    def drop(self, number: int) -> None:
        """Forget a loaded adapter; a slot that holds it keeps it until another one is placed there."""
        self._loaded.pop(number, None)

    @torch.no_grad()
    def begin(self, plan: StepPlan) -> None:
        """Place the adapters that ``plan`` asks for, and let the layers compute its rows."""
        for slot, number in plan.adapter_loads:
            adapter = self._loaded[number]
            for path, placed in self._targets.items():
                like = torch.empty(0, dtype=self._dtype, device=placed.layer.weight.device)
                placed.target.place(slot, adapter.get(path), self._num_slots, self._rank, like)
        self._batch.rows = self._rows(plan) if plan.has_adapters else None

    def _rows(self, plan: StepPlan) -> AdapterRows:
        slots, rows = np.array(plan.adapter_rows, dtype=np.int64).T
        ends = np.cumsum(np.bincount(slots, minlength=self._num_slots)).astype(np.int32)
        is_all = len(rows) == plan.num_tokens and bool((rows == np.arange(len(rows))).all())
        device = next(iter(self._targets.values())).layer.weight.device
        return AdapterRows(
            rows=None if is_all else torch.tensor(rows, device=device),
            ends=torch.tensor(ends, device=device),
            slots=torch.tensor(slots, device=device),
            active=tuple(map(int, np.unique(slots))),
        )

    def _target(self, path: str, given: str, weights: AdapterWeights) -> LoraTarget:
        """The target of an adapted module; raises CheckpointError for one that cannot be adapted."""
        if (placed := self._targets.get(path)) is not None:
            return placed.target
        where = f"{weights.names[given][0]} in {weights.checkpoint.file_of(weights.names[given][0])}"
        module = _nearest(self._model, path)
        kind = "experts" if isinstance(module, Experts) else path.rpartition(".")[2]
        known = sorted({name.rpartition(".")[2] for name in self._targets})
        if module is None:
            raise CheckpointError(f"{where}: {self._model.config.architecture} has no module {path}")
        raise CheckpointError(f"{where}: {kind} cannot be adapted; supported: {', '.join(known)}")

    def _read(self, weights: AdapterWeights, path: str, target: LoraTarget, adapter: PeftAdapter) -> AdapterMatrices:
        (down_name, up_name), rank = weights.names[path], adapter.rank_of(path)
        outs, ins = target.shape
        first, count = target.inputs
        down = weights.checkpoint.read(down_name, (rank, ins), 1, first, count)
        parts = [weights.checkpoint.read(up_name, (outs, rank), 0, start, rows) for start, rows in target.outputs]
        up: Tensor = torch.cat(parts)
        return AdapterMatrices(down.to(self._dtype), up.to(self._dtype), adapter.scaling_of(path))


def _nearest(model: nn.Module, path: str) -> nn.Module | None:
    """The module at ``path``, or the experts that contain it; None if there is none."""
    module: nn.Module = model
    for name in path.split("."):
        if isinstance(module, Experts):
            return module
        if name not in dict(module.named_children()):
            return None
        module = module.get_submodule(name)
    return module
