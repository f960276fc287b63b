"""AdapterReader: reads one rank's shard of a LoRA adapter, in the layout of the layers that apply the adapter."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tapscope.core.errors import CheckpointError
from tapscope.engine.checkpoint.peft_adapter import AdapterWeights, PeftAdapter
from tapscope.engine.checkpoint.stored_tensors import renamed
from tapscope.engine.layers.experts import Experts, in_block
from tapscope.engine.layers.lora import AdapterMatrices, LoraTarget
from tapscope.engine.models.decoder import CausalLM

_WRAPPED = ".base_layer"
"""Path component under which PEFT's wrapper stores the module that it adapts."""


@dataclass(frozen=True, slots=True)
class _Matrix:
    """One expert matrix, adapted as a separate linear layer."""

    expert: int
    part: int
    """Index of the matrix among the expert's matrices in the stack: 0 gate, 1 up."""


class AdapterReader:
    """Reader of the LoRA adapters of one model."""

    def __init__(self, model: CausalLM, targets: Mapping[str, LoraTarget], dtype: torch.dtype) -> None:
        """``targets``: by path."""
        self._model, self._targets, self._dtype = model, targets, dtype
        self._experts: dict[str, tuple[str, Experts]] = {}
        """Path of experts, in checkpoints or in this model -> (path in this model, module)."""
        for path, module in model.named_modules():
            if isinstance(module, Experts):
                self._experts |= dict.fromkeys((in_block(path, module.config.block), path), (path, module))

    def read(self, adapter: PeftAdapter, weights: AdapterWeights) -> dict[str, AdapterMatrices]:
        """Read the matrices of each adapted target, by path; raises CheckpointError for unsupported modules."""
        adapted: dict[str, AdapterMatrices] = {}
        each: dict[tuple[str, str], dict[str, _Matrix]] = {}
        for given in weights.names:
            path = renamed(given, self._model.checkpoint_prefixes)
            if (target := self._targets.get(path)) is not None and not target.stack:
                adapted[path] = self._linear(weights, given, target, adapter)
            elif (owner := self._experts.get(path.replace(_WRAPPED, ""))) is not None:
                name = _wrapped_stack(owner[1], given, adapter, weights)
                adapted[f"{owner[0]}.{name}"] = self._stack(weights, given, owner, name, adapter)
            elif (one := self._matrix(path)) is not None:
                experts, name, matrix = one
                each.setdefault((experts, name), {})[given] = matrix
            else:
                raise self._refusal(path, weights.where(given))
        for (experts, name), matrices in each.items():
            adapted[f"{experts}.{name}"] = self._matrices(weights, matrices, experts, name, adapter)
        return adapted

    def _refusal(self, path: str, where: str) -> CheckpointError:
        """Return the error for a module that cannot be adapted."""
        if path not in dict(self._model.named_modules()):
            return CheckpointError(f"{where}: {self._model.config.architecture} has no module {path}")
        known = sorted({name.rpartition(".")[2] for name in self._targets})
        return CheckpointError(f"{where}: {path.rpartition('.')[2]} cannot be adapted; supported: {', '.join(known)}")

    def _linear(self, weights: AdapterWeights, path: str, target: LoraTarget, adapter: PeftAdapter) -> AdapterMatrices:
        (down_name, up_name), rank = weights.names[path], adapter.rank_of(path)
        outs, ins = target.shape
        first, count = target.inputs
        down = weights.checkpoint.read(down_name, (rank, ins), 1, first, count)
        parts = [weights.checkpoint.read(up_name, (outs, rank), 0, start, rows) for start, rows in target.outputs]
        up: Tensor = torch.cat(parts)
        return AdapterMatrices(down.to(self._dtype), up.to(self._dtype), adapter.scaling_of(path))

    def _stack(
        self, weights: AdapterWeights, given: str, owner: tuple[str, Experts], name: str, adapter: PeftAdapter
    ) -> AdapterMatrices:
        """Read an adapter of a whole stack: A [experts * rank, ins] and B [outs, rank * experts], expert innermost."""
        path, experts = owner
        target, count = self._targets[f"{path}.{name}"], experts.config.num_experts
        module = f"{given.replace(_WRAPPED, '')}.{name}"
        (down_name, up_name), rank = weights.names[given], adapter.rank_of(module)
        outs, ins = reversed(target.shape) if experts.peft_swaps_axes else target.shape
        down = weights.checkpoint.read(down_name, (count * rank, ins), 0, 0, count * rank).view(count, rank, ins)
        up = weights.checkpoint.read(up_name, (outs, rank * count), 0, 0, outs).view(outs, rank, count).permute(2, 0, 1)
        if experts.peft_swaps_axes:
            down, up = up.mT, down.mT
        own, (first, num) = slice(experts.first, experts.first + experts.num_local), target.inputs
        down = down[own, :, first : first + num].to(self._dtype, copy=True)
        up = torch.cat([up[own, start : start + rows] for start, rows in target.outputs], dim=1)
        return AdapterMatrices(down, up.to(self._dtype), adapter.scaling_of(module))

    def _matrix(self, path: str) -> tuple[str, str, _Matrix] | None:
        """Return the experts' path, the stack name and the matrix at ``path``; None if it is not an expert's matrix."""
        head, _, part = path.rpartition(".")
        stored, _, number = head.rpartition(".")
        if stored not in self._experts or not number.isdecimal():
            return None
        experts_path, experts = self._experts[stored]
        if int(number) >= experts.config.num_experts:
            return None
        for name, parts in experts.stacks.items():
            if part in parts:
                return experts_path, name, _Matrix(int(number), list(parts).index(part))
        return None

    def _matrices(
        self, weights: AdapterWeights, matrices: Mapping[str, _Matrix], path: str, name: str, adapter: PeftAdapter
    ) -> AdapterMatrices:
        """Stack the adapters of single matrices; gate and up become blocks of one update of both."""
        (_, experts), target = self._experts[path], self._targets[f"{path}.{name}"]
        parts, rank = len(experts.stacks[name]), max(adapter.rank_of(given) for given in matrices)
        outs, (first, num) = target.shape[0] // parts, target.inputs
        factor = adapter.scaling_of(next(iter(matrices)))
        down = torch.zeros(experts.num_local, parts * rank, num, dtype=self._dtype)
        up = torch.zeros(experts.num_local, target.width, parts * rank, dtype=self._dtype)
        for given, matrix in matrices.items():
            (down_name, up_name), own = weights.names[given], adapter.rank_of(given)
            start, rows = target.outputs[matrix.part]
            read_down = weights.checkpoint.read(down_name, (own, target.shape[1]), 1, first, num)
            read_up = weights.checkpoint.read(up_name, (outs, own), 0, start - matrix.part * outs, rows)
            local, block = matrix.expert - experts.first, slice(matrix.part * rank, matrix.part * rank + own)
            if 0 <= local < experts.num_local:
                down[local, block] = read_down
                ratio = adapter.scaling_of(given) / factor
                up[local, matrix.part * rows : (matrix.part + 1) * rows, block] = read_up * ratio
        return AdapterMatrices(down, up, factor)


def _wrapped_stack(experts: Experts, given: str, adapter: PeftAdapter, weights: AdapterWeights) -> str:
    """Return the stack that PEFT's wrapper ``given`` adapts; wrappers nest per parameter, the first innermost."""
    path, depth = given.replace(_WRAPPED, ""), given.count(_WRAPPED)
    names = [name for name, _ in experts.named_parameters(recurse=False)]
    adapted = [name for name in names if adapter.targets_parameter(f"{path}.{name}")]
    other = next((name for name in adapted if name not in experts.stacks), None)
    if other is not None:
        known = ", ".join(experts.stacks)
        raise CheckpointError(f"{weights.where(given)}: {other} cannot be adapted; supported: {known}")
    ordered = [name for name in experts.stacks if name in adapted]
    if depth >= len(ordered):
        raise CheckpointError(
            f"{weights.where(given)}: target_parameters={list(adapter.target_parameters)} in adapter_config.json "
            f"names {len(ordered)} parameters of {path}, but {depth + 1} are adapted"
        )
    return ordered[-1 - depth]
