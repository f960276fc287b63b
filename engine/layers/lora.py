"""LoRA, arXiv:2106.09685: low-rank updates of linear layers, possibly a different adapter for each row of a step.

An adapter adds ``scaling * B (A x)`` to the output of a linear layer, with A [rank, ins] and B [outs, rank]. The
adapters of a step occupy *slots*. Rows are sorted by slot, so that one grouped GEMM serves all adapters
(arXiv:2311.03285). The base layer computes all rows without adapters, and rows without an adapter stay bit-identical to
those of a model without adapters.

The matrices of a slot are zero-padded to the largest LoRA rank. A row-parallel layer shards the columns of A, so that
each rank's update is a partial sum like the layer's output; a column-parallel layer shards the rows of B.

Experts have an update per expert. Their rows are (token, expert) pairs, sorted by slot, then by expert.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

from tapscope.engine.checkpoint.weight_loader import WeightSlice
from tapscope.engine.layers.experts import Experts
from tapscope.engine.layers.fused import linear
from tapscope.engine.layers.grouped_linear import grouped_linear
from tapscope.engine.layers.probe import PARTIAL, Probe, is_watched

ROWS = "adapters"
"""Name of the row set of a step's adapted rows, in slot order."""


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """Rows of one step that have an adapter."""

    rows: Tensor | None
    """Row indices [n] int64, sorted by slot; None if all rows have an adapter and are already in slot order."""
    ends: Tensor
    """End of each slot's rows, [slots] int32; for expert pairs, end of each (slot, expert) group, [slots * experts]."""
    slots: Tensor
    """Slot of each row, [n] int64."""
    active: tuple[int, ...]
    """Slots that have rows."""


@dataclass(slots=True)
class AdapterBatch:
    """Adapters of the rows in the current step, shared by the layers of one model."""

    rows: AdapterRows | None = None
    """None if no row has an adapter."""


@dataclass(slots=True)
class AdapterMatrices:
    """One rank's shard of an adapter in one layer."""

    down: Tensor
    """A, [rank, ins]; for experts [experts, rank, ins]."""
    up: Tensor
    """B, [outs, rank]; for experts [experts, outs, rank]."""
    scaling: float


@dataclass(slots=True)
class LoraTarget:
    """One linear layer of the checkpoint, or one stack of expert matrices, with its adapters.

    A fused layer has several targets.
    """

    path: str
    """Path of the linear layer or parameter in the checkpoint."""
    shape: tuple[int, int]
    """Number of outputs and inputs of the whole layer, over all ranks."""
    inputs: tuple[int, int]
    """First input and number of inputs on this rank."""
    outputs: list[tuple[int, int]]
    """First output and number of outputs of each contiguous range of outputs on this rank."""
    first: int
    """Offset of this target's features in the output of the (fused) layer."""
    lora_a: Probe
    lora_b: Probe
    base_layer: Probe | None = None
    """Probe of the base layer's output; None for experts."""
    stack: tuple[int, ...] = ()
    """[number of experts on this rank] for experts; empty for a linear layer."""
    down: Tensor | None = None
    """[slots, (experts,) rank, ins]; None until the first adapter of this layer is placed."""
    up: Tensor | None = None
    """[slots, (experts,) outs, rank]."""
    scaling: Tensor | None = None
    """[slots, 1] float32."""
    factors: list[float] = field(default_factory=list)
    """Host copy of :attr:`scaling`."""
    ranks: list[int] = field(default_factory=list)
    """LoRA rank of the adapter in each slot; 0 if the adapter does not adapt this layer."""

    @property
    def width(self) -> int:
        """Number of output features of this target on this rank."""
        return sum(count for _, count in self.outputs)

    def place(self, slot: int, adapter: AdapterMatrices | None, num_slots: int, rank: int, like: Tensor) -> None:
        """Copy ``adapter`` into ``slot``; None means that the slot's adapter does not adapt this layer.

        ``rank`` is the largest LoRA rank of any adapter. ``like``, the layer's input or weight, provides device and
        dtype. If the adapter's own rank exceeds ``rank``, as for an update composed of several, the buffers grow to a
        multiple.
        """
        own = 0 if adapter is None else adapter.down.shape[-2]
        rank *= max(1, -(-own // rank))
        if self.down is None or self.up is None or self.scaling is None:
            if adapter is None:
                return
            self.down = like.new_zeros(num_slots, *self.stack, rank, self.inputs[1])
            self.up = like.new_zeros(num_slots, *self.stack, self.width, rank)
            self.scaling = like.new_zeros(num_slots, 1, dtype=torch.float32)
            self.ranks, self.factors = [0] * num_slots, [0.0] * num_slots
        elif rank > self.down.shape[-2]:
            missing = rank - self.down.shape[-2]
            self.down, self.up = functional.pad(self.down, (0, 0, 0, missing)), functional.pad(self.up, (0, missing))
        self.ranks[slot] = own
        self.down[slot].zero_()
        self.up[slot].zero_()
        if adapter is not None:
            self.down[slot, ..., :own, :] = adapter.down
            self.up[slot, ..., :own] = adapter.up
            self.scaling[slot] = self.factors[slot] = adapter.scaling

    def update(self, input: Tensor, rows: AdapterRows) -> Tensor | None:
        """Return the LoRA update [n, outs] of the adapted rows [n, ins]; None if no active adapter adapts it."""
        rank = max(self.ranks[slot] for slot in rows.active) if self.ranks else 0
        if rank == 0 or self.down is None or self.up is None or self.scaling is None:
            return None
        inner = _product(input, self.down, rows)
        if is_watched(self.lora_a):
            self.lora_a(inner[:, :rank])
        outer: Tensor = self.lora_b(_product(inner, self.up, rows))
        factors = {self.factors[slot] for slot in rows.active if self.ranks[slot]}
        if len(factors) == 1:
            return outer * factors.pop()
        return (outer * self.scaling[rows.slots]).to(outer.dtype)


class LoraLayer:
    """Adapters of one engine module, whose output consists of one or several layers of the checkpoint."""

    def __init__(self, targets: Sequence[LoraTarget], batch: AdapterBatch) -> None:
        self.targets, self._batch = targets, batch

    def apply(self, input: Tensor, output: Tensor) -> Tensor:
        """Add the step's LoRA updates to ``output`` [tokens, outs], the base output for ``input`` [tokens, ins]."""
        probes = [(target, probe) for target in self.targets if (probe := target.base_layer) is not None]
        watched = [(target, probe) for target, probe in probes if is_watched(probe)]
        for target, probe in watched:
            probe(output[:, target.first : target.first + target.width])
        step = self._batch.rows
        if step is None:
            return output
        if watched:
            output = output.clone()  # taps have observed the base layer's output, which must not change
        chosen = input if step.rows is None else input[step.rows]
        for target in self.targets:
            update = target.update(chosen, step)
            if update is None:
                continue
            part = output[:, target.first : target.first + target.width]
            if step.rows is None:
                part += update
            else:
                part.index_add_(0, step.rows, update)
        return output


class ExpertsLora:
    """Adapters of one experts module."""

    def __init__(self, targets: Mapping[str, LoraTarget], num_slots: int, batch: AdapterBatch) -> None:
        """``targets``: by stack name."""
        self.targets, self._num_slots, self._batch = targets, num_slots, batch
        self._pairs: AdapterRows | None = None

    def begin(self, tokens: Tensor, ends: Tensor, num_tokens: int) -> None:
        """Group the step's pairs that have adapters by slot and expert, for :meth:`apply`.

        ``tokens`` [pairs] int64: token of each pair, sorted by expert; ``ends`` [experts] int32: end of each local
        expert's pairs. Pairs past the last end belong to other ranks' experts.
        """
        step, self._pairs = self._batch.rows, None
        count = len(ends)
        if step is None or not count:
            return
        slot_of = step.slots
        if step.rows is not None:
            slot_of = step.slots.new_full((num_tokens,), -1).index_copy_(0, step.rows, step.slots)
        slots = slot_of[tokens]
        numbers = torch.arange(len(tokens), dtype=ends.dtype, device=ends.device)
        experts = torch.searchsorted(ends, numbers, right=True)
        groups = torch.where((slots < 0) | (experts == count), self._num_slots * count, slots * count + experts)
        groups, rows = torch.sort(groups, stable=True)
        every = torch.arange(self._num_slots * count, device=ends.device)
        group_ends = torch.searchsorted(groups, every, right=True, out_int32=True)
        rows = rows[: int(group_ends[-1])]
        if len(rows):
            self._pairs = AdapterRows(rows=rows, ends=group_ends, slots=slots[rows], active=step.active)

    def apply(self, name: str, input: Tensor, output: Tensor) -> Tensor:
        """Add the LoRA updates of stack ``name`` to ``output`` [pairs, outs], computed from ``input`` [pairs, ins]."""
        if self._pairs is not None and self._pairs.rows is not None:
            update = self.targets[name].update(input[self._pairs.rows], self._pairs)
            if update is not None:
                output.index_add_(0, self._pairs.rows, update)
        return output


def _product(input: Tensor, matrices: Tensor, rows: AdapterRows) -> Tensor:
    """Multiply each row of [n, ins] by the matrix [outs, ins] of its slot, and of its expert if any -> [n, outs]."""
    if len(rows.active) > 1:
        return grouped_linear(input, matrices.flatten(0, -3), rows.ends)
    (slot,) = rows.active
    if matrices.ndim == 3:
        return linear(input, matrices[slot])
    count = matrices.shape[1]
    return grouped_linear(input, matrices[slot], rows.ends[slot * count : (slot + 1) * count])


def lora_targets(root: nn.Module, module: nn.Module, slices: Sequence[WeightSlice]) -> Iterator[LoraTarget]:
    """Yield the targets of ``module``, whose weight consists of ``slices``, and add their sites as modules of ``root``.

    Sites have PEFT's names: ``base_layer``, ``lora_A.default`` and ``lora_B.default`` below the layer's own path.
    """
    parts: dict[str, list[WeightSlice]] = {}
    for part in slices:
        if part.is_matrix:
            parts.setdefault(part.name.removesuffix(".weight"), []).append(part)
    dims: dict[str, str] = getattr(module, "tap_dims", {})
    first = 0
    for index, (path, own) in enumerate(parts.items()):
        is_split = own[0].dim == 1  # along inputs: the outputs are partial sums
        out = PARTIAL if is_split else dims.get(f"out[{index}]", dims.get("out", ""))
        site = _submodule(root, path)
        base_layer, lora_b = Probe(out), Probe(out, ROWS, is_optional=True)
        lora_a = Probe("t r[tp:partial]" if is_split else "t r # tp:replicated", ROWS, is_optional=True)
        if not out:  # dims cannot express one axis of a packed layer's shards
            base_layer.tap_ports = lora_b.tap_ports = ()
        site.base_layer = base_layer
        site.lora_A, site.lora_B = (nn.ModuleDict({"default": probe}) for probe in (lora_a, lora_b))
        outs, ins = own[0].shape
        target = LoraTarget(
            path=path,
            shape=(outs, ins),
            inputs=(own[0].start, own[0].extent[1]) if is_split else (0, ins),
            outputs=[(0, outs)] if is_split else [(part.start, len(part.into)) for part in own],
            first=first,
            base_layer=base_layer,
            lora_a=lora_a,
            lora_b=lora_b,
        )
        first += target.width
        yield target


def expert_targets(root: nn.Module, experts: Experts, path: str) -> dict[str, LoraTarget]:
    """Return the targets of ``experts`` by stack name, and add their sites as modules of ``root``.

    Sites have PEFT's names for adapters of both stacks, where PEFT nests one wrapper in the other. ``lora_A.default``
    and ``lora_B.default`` of the second stack are below the experts, those of the first stack below ``base_layer``.
    """
    size, hidden = experts.config.intermediate_size, experts.hidden_size
    start, end = experts.shard.features
    is_split, has_all = end - start < size, experts.num_local == experts.config.num_experts
    up, down = experts.stacks
    sums = "[tp:partial]"
    inner = {up: "pair r # tp:replicated", down: f"pair r{sums}"}
    outer = {up: "" if is_split else "pair h # tp:replicated", down: f"pair h{sums}"}
    targets = {}
    for name, site in ((down, experts), (up, _submodule(root, f"{path}.base_layer"))):
        lora_a, lora_b = (Probe(dims[name], is_optional=True) for dims in (inner, outer))
        if not has_all:  # each rank has different pairs
            lora_a.tap_ports = ()
        if not has_all or not outer[name]:
            lora_b.tap_ports = ()
        site.lora_A, site.lora_B = (nn.ModuleDict({"default": probe}) for probe in (lora_a, lora_b))
        targets[name] = LoraTarget(
            path=f"{path}.{name}",
            shape=experts.stack_shapes[name],
            inputs=(0, hidden) if name == up else (start, end - start),
            outputs=experts.up_rows if name == up else [(0, hidden)],
            first=0,
            lora_a=lora_a,
            lora_b=lora_b,
            stack=(experts.num_local,),
        )
    return targets


def _submodule(root: nn.Module, path: str) -> nn.Module:
    """Return the module at ``path``, creating it if only its parent exists."""
    parent, _, name = path.rpartition(".")
    holder = root.get_submodule(parent)
    if not hasattr(holder, name):
        holder.add_module(name, nn.Module())
    return root.get_submodule(path)
