"""Experts: the feed-forward networks of a mixture of experts, split over ranks by expert and by feature.

Hidden states are replicated: every rank computes the (token, expert) pairs of its own experts, and an all-reduce sums
the ranks' results. Expert parallelism therefore needs no all-to-all.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from tapscope.engine.checkpoint.quantization import INT4, ActivationScheme
from tapscope.engine.checkpoint.weight_loader import CheckpointModule, Scales, WeightSlice, linear_weight
from tapscope.engine.distributed.tensor_parallel import TensorParallel, span
from tapscope.engine.hf_config.moe_config import MoeConfig
from tapscope.engine.layers.activation import Activation
from tapscope.engine.layers.fused import fused_for, product_kernels
from tapscope.engine.layers.grouped_linear import grouped_linear, is_one_launch, one_matrix_linear, waits_for_host
from tapscope.engine.layers.probe import PARTIAL, WHOLE, Probe, is_watched
from tapscope.engine.layers.quantized import (
    InputQuantizer,
    QuantizedWeight,
    grouped_int4_product,
    grouped_scaled_product,
    runs_grouped,
    runs_int4,
    scaled_product,
)

if TYPE_CHECKING:
    from tapscope.engine.layers.lora import ExpertsLora

ROUTING_DIMS = "t k # tp:replicated"
"""Dims of a router's expert ids and weights, [tokens, k]."""


@dataclass(frozen=True, slots=True)
class ExpertShard:
    """Experts and intermediate features of one rank, each as a range [start, end)."""

    experts: tuple[int, int]
    features: tuple[int, int]

    @classmethod
    def of(cls, tp: TensorParallel, config: MoeConfig) -> "ExpertShard":
        """Return this rank's shard of the experts and their features.

        Experts are split over ``tp.ep`` groups of consecutive ranks, features over the ranks of a group. Sizes need not
        be divisible: the last groups may hold fewer experts and the last ranks fewer or no features.
        """
        group_size = tp.size // tp.ep
        group, member = divmod(tp.rank, group_size)
        unit = 1 if config.intermediate_size % config.feature_block else config.feature_block
        start, end = span(config.intermediate_size // unit, member, group_size)
        return cls(span(config.num_experts, group, tp.ep), (start * unit, end * unit))


class ExpertMatrix(NamedTuple):
    """One matrix [outs, ins] of an expert, and the location of this rank's part."""

    name: str
    """Tensor name in checkpoints that store one tensor per matrix."""
    stack: str
    """Name of the parameter that contains the matrix."""
    row: int
    """First row of the matrix in the expert's matrix of the stacked tensor."""
    shape: tuple[int, int]
    """Shape of the whole matrix, over all ranks."""
    into: Tensor
    """View of the parameter: elements [start, start + into.shape[dim]) of the whole matrix along ``dim``."""
    dim: int
    start: int
    scales: Scales | None = None
    """Destination of the scales, if the matrix stays quantized."""


class Experts(CheckpointModule):
    """This rank's shard of routed experts: the sum over each token's experts of weight * down(act(gate(x)) * up(x)).

    Parameters are stacked as in transformers: `gate_up_proj` [experts, 2 * features, hidden], gate's rows first, and
    `down_proj` [experts, hidden, features]. Both may stay quantized in memory. An expert's matrix is then dequantized
    when the expert has tokens, unless the input is quantized too.
    """

    may_quantize = True
    scales_inputs: ClassVar[bool] = False
    """Whether routing weights multiply the experts' inputs instead of their outputs (Llama 4)."""
    num_up: ClassVar[int] = 2
    """Number of matrices per expert in the first stack: gate and up."""
    peft_swaps_axes: ClassVar[bool] = False
    """Whether PEFT mistakes the input axis of the stacks for the output axis (Llama 4)."""

    def __init__(
        self, config: MoeConfig, hidden_size: int, activation: str, tp: TensorParallel, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.config, self.hidden_size, self.tp = config, hidden_size, tp
        self.shard = ExpertShard.of(tp, config)
        self.first, end = self.shard.experts
        self.num_local = end - self.first
        self._is_whole = self.num_local == config.num_experts
        self.is_padding: Tensor | None = None
        """[tokens, 1] bool: padding rows, which no expert computes (:func:`excluding_padding`); None if no row is
        padding."""
        self.may_repeat = False
        """Whether a token may have the same expert twice, which replayed routing allows."""
        self._numbers = torch.arange(self.num_local)
        features = self.shard.features[1] - self.shard.features[0]
        self.gate_up_proj = linear_weight(self.num_local, 2 * features, hidden_size, dtype=dtype)
        self.down_proj = linear_weight(self.num_local, hidden_size, features, dtype=dtype)
        self.scales: nn.ParameterDict | None = None
        """Scales [experts, scale rows, groups] of the stacks that stay quantized."""
        self.zeros = nn.ParameterDict()
        """Zero points of 4-bit stacks, of the same shape as the scales; a stack without an entry uses 8."""
        self.kept: dict[str, QuantizedWeight] = {}
        self.gate_up_input_quantizer: InputQuantizer | None = None
        self.down_input_quantizer: InputQuantizer | None = None
        self.lora: ExpertsLora | None = None
        """LoRA adapters of the experts; None in an engine without adapters."""
        self.act_fn = PairActivation(activation)
        self.partial = Probe(PARTIAL)
        routing = dict.fromkeys(("in[top_k_index]", "in[top_k_weights]"), ROUTING_DIMS)
        self.tap_dims = {"in[hidden_states]": WHOLE, "out": WHOLE} | routing

    @property
    def stacks(self) -> Mapping[str, Sequence[str]]:
        """Parameter name -> names of each expert's matrices in that parameter; empty if files store only the stack."""
        return {"gate_up_proj": self.config.parts[:2], "down_proj": self.config.parts[2:]}

    @property
    def stack_shapes(self) -> dict[str, tuple[int, int]]:
        """Shape [outs, ins] of an expert's whole matrix in each stack, over all ranks."""
        up, down = self.stacks
        size = self.config.intermediate_size
        return {up: (self.num_up * size, self.hidden_size), down: (self.hidden_size, size)}

    @property
    def up_rows(self) -> list[tuple[int, int]]:
        """First row and number of rows of each contiguous range of this rank's rows in an expert's first stack."""
        start, end = self.shard.features
        return [(part * self.config.intermediate_size + start, end - start) for part in range(self.num_up)]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Compute [tokens, hidden] from [tokens, hidden] and the expert ids and weights [tokens, k].

        Pairs are sorted by expert, then token, for one grouped GEMM over all experts; each token's results are summed
        in the order of ``top_k_index``. Does not synchronize with the device, unless rows have LoRA adapters.
        """
        num_tokens, top_k = top_k_index.shape
        if self.is_padding is not None:
            top_k_index = top_k_index.masked_fill(self.is_padding, -1)
        kernels = fused_for(hidden_states) if self.num_local else None
        places: Tensor | None = None
        if kernels is None:
            order, ends, is_foreign = self._sort(top_k_index.flatten())
        else:
            order, places, ends = kernels.moe.route(top_k_index.flatten(), self.first, self.num_local)
            numbers = torch.arange(len(order), device=order.device) if self._has_foreign else None
            is_foreign = None if numbers is None else (numbers >= ends[-1:]).unsqueeze(-1)
        pairs = hidden_states[order // top_k]
        if self.scales_inputs:
            pairs = pairs * top_k_weights.flatten()[order].unsqueeze(-1)
            top_k_weights = torch.ones_like(top_k_weights)
        if self.lora is not None:
            self.lora.begin(order // top_k, ends, num_tokens)
        gate_up = _zero_foreign(self.gate_up(pairs, ends), is_foreign)
        down = _zero_foreign(self.down(self.activated(gate_up), ends), is_foreign)
        if kernels is not None and places is not None:
            summand = kernels.moe.combine(down, places, top_k_weights.contiguous())
        else:
            outputs = torch.empty_like(down).index_copy_(0, order, down).view(num_tokens, top_k, -1)
            summand = (outputs * top_k_weights.unsqueeze(-1)).sum(dim=1).to(hidden_states.dtype)
        return self.tp.all_reduce(self.partial(summand))

    @property
    def _has_foreign(self) -> bool:
        return not self._is_whole or self.is_padding is not None

    def gate_up(self, pairs: Tensor, ends: Tensor) -> Tensor:
        """Compute gate and up of ``pairs`` [pairs, hidden], sorted by expert; ``ends`` as in :func:`grouped_linear`."""
        return self.product(pairs, "gate_up_proj", ends, self.gate_up_input_quantizer)

    def activated(self, gate_up: Tensor) -> Tensor:
        """Apply the gated activation: [pairs, 2 * features] -> [pairs, features]."""
        if not is_watched(self.act_fn) and (fused := fused_for(gate_up)) is not None:
            output: Tensor = fused.gated(gate_up, None, self.act_fn.name)
            return output
        gate, up = gate_up.chunk(2, dim=-1)
        active: Tensor = self.act_fn(gate) * up
        return active

    def down(self, active: Tensor, ends: Tensor) -> Tensor:
        """Project [pairs, features] to [pairs, hidden], this rank's partial sum."""
        return self.product(active, "down_proj", ends, self.down_input_quantizer)

    def product(self, rows: Tensor, name: str, ends: Tensor, quantizer: InputQuantizer | None = None) -> Tensor:
        """Multiply [pairs, ins] by the matrices of stack ``name`` -> [pairs, outs], including LoRA updates."""
        output = self._base_product(rows, name, ends, quantizer)
        return output if self.lora is None else self.lora.apply(name, rows, output)

    def _base_product(self, rows: Tensor, name: str, ends: Tensor, quantizer: InputQuantizer | None) -> Tensor:
        weight = getattr(self, name)
        if self.scales is None:
            return grouped_linear(rows, weight, ends)
        codes, scale = (rows, None) if quantizer is None else quantizer(rows)
        if is_one_launch(len(rows)) and self._runs_grouped(name, codes, scale):
            return self.grouped_product(codes, scale, name, ends, rows.dtype)
        group = None if quantizer is None else quantizer.scheme.group
        output, start = rows.new_zeros(len(rows), weight.shape[1]), 0
        for expert, end in enumerate(ends.tolist()):
            if end > start:
                part = slice(start, end)
                by = None if scale is None else scale[part]
                output[part] = self.expert_product(codes[part], by, group, name, expert, rows.dtype)
            start = end
        return output

    def expert_product(
        self, codes: Tensor, scale: Tensor | None, group: int | None, name: str, expert: int, dtype: torch.dtype
    ) -> Tensor:
        """Multiply rows by one quantized matrix.

        ``scale``: scales of quantized rows, one per ``group`` features; None for unquantized rows.
        """
        assert self.scales is not None, "the experts are quantized"
        zero = self.zeros[name][expert] if name in self.zeros else None
        return scaled_product(
            codes, scale, getattr(self, name)[expert], self.scales[name][expert], self.kept[name].layout, dtype,
            input_group=group, zero=zero, product=one_matrix_linear,
        )  # fmt: skip

    def keep_quantized(self, kept: Mapping[str, QuantizedWeight], device: torch.device) -> None:
        """Replace both stacks with uninitialized codes and scales on ``device``."""
        self.scales = nn.ParameterDict()
        for name, one in kept.items():
            codes, self.scales[name], zeros = one.allocate(getattr(self, name).shape, device)
            setattr(self, name, codes)
            if zeros is not None:
                self.zeros[name] = zeros
            self.kept[name] = replace(one, layout=one.layout.to(device))

    def quantize_inputs(self, scheme: ActivationScheme, static: Mapping[str, Sequence[float]]) -> None:
        """Quantize the inputs of experts with quantized weights.

        ``static``: for a static scheme, the input scale of each matrix, by stack.
        """
        for name, dims in (("gate_up_proj", "pair h"), ("down_proj", "pair h[tp]")):
            quantizer = InputQuantizer(scheme, dims).to(self.gate_up_proj.device)
            if scheme.is_static:
                quantizer.set_part_scales(static[name])
            setattr(self, name.removesuffix("proj") + "input_quantizer", quantizer)

    @property
    def waits_for_host(self) -> bool:
        """Whether the GEMMs of few tokens run expert by expert, with row counts copied back to the host.

        True if neither torch's grouped_mm nor a Triton kernel supports the weights.
        """
        if self.scales is not None:
            return not all(self._runs_grouped(name, *self._one_row(name)) for name in self.stacks)
        weights = [getattr(self, name) for name in self.stacks]
        return any(waits_for_host(weight) and product_kernels(weight) is None for weight in weights)

    def _one_row(self, name: str) -> tuple[Tensor, Tensor | None]:
        """Return an uninitialized row as input of the quantized stack ``name``, and scales if inputs are quantized."""
        weight: Tensor = getattr(self, name)
        quantizer = getattr(self, name.removesuffix("proj") + "input_quantizer", None)
        start, end = self.shard.features
        ins = self.hidden_size if name == next(iter(self.stacks)) else end - start
        if quantizer is None:
            return weight.new_empty(1, ins, dtype=torch.float32), None
        groups = -(-ins // (quantizer.scheme.group or ins))
        return weight.new_empty(1, ins), weight.new_empty(1, groups, dtype=torch.float32)

    def _runs_grouped(self, name: str, codes: Tensor, scale: Tensor | None) -> bool:
        """Return whether :meth:`grouped_product` supports these rows."""
        if self.kept[name].dtype == INT4:
            groups = self.kept[name].layout.shape[1]
            return scale is None and self.kept[name].layout.offset == 0 and runs_int4(codes, groups)
        return runs_grouped(codes, scale, getattr(self, name), self.kept[name].layout)

    def grouped_product(
        self, codes: Tensor, scale: Tensor | None, name: str, ends: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """Multiply rows by the quantized matrices of all experts in one launch; ``scale``: of quantized rows."""
        assert self.scales is not None, "the experts are quantized"
        weight, layout, most = getattr(self, name), self.kept[name].layout, self.most_rows(codes)
        if self.kept[name].dtype == INT4:
            zeros = self.zeros.get(name)
            return grouped_int4_product(codes, weight, self.scales[name], zeros, layout.rows, ends, most)
        return grouped_scaled_product(codes, scale, weight, self.scales[name], layout, dtype, ends, most)

    def most_rows(self, pairs: Tensor) -> int:
        """Return the largest number of rows that one expert can have among ``pairs`` [pairs, ...]."""
        return len(pairs) // (1 if self.may_repeat else self.config.top_k)

    def _sort(self, experts: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Sort pairs by expert id [n]: order of pairs [n], end of each local expert's rows, ``is_foreign`` [n, 1].

        Foreign pairs are those of other ranks' experts and of padding. Foreign pairs come last, those of padding after
        all others. ``is_foreign`` is None if no pair can be foreign.
        """
        if self._has_foreign:
            experts = experts - self.first
            experts = experts.masked_fill((experts < 0) | (experts >= self.num_local), self.num_local)
        experts, order = torch.sort(experts, stable=True)
        ends = torch.searchsorted(experts, self._numbers, right=True, out_int32=True)
        return order, ends, (experts == self.num_local).unsqueeze(-1) if self._has_foreign else None

    def layouts(self, path: str) -> Iterator[list[WeightSlice]]:
        """Yield the layouts of checkpoints: one matrix per expert and projection, as in most, or stacked parameters."""
        paths = dict.fromkeys((in_block(path, self.config.block), path))
        for stored in paths:
            yield self.single_matrices(stored)
        for stored in paths:
            yield self.stacked_matrices(stored)

    def single_matrices(self, path: str) -> list[WeightSlice]:
        """Return the slices of the layout with one tensor per matrix of each expert."""
        return [
            WeightSlice(
                f"{path}.{expert}.{one.name}.weight", one.shape, one.into, one.dim, one.start, scales=one.scales
            )
            for expert in range(self.config.num_experts)
            for one in self.matrices(expert)
        ]

    def stacked_matrices(self, path: str, *, transposed: bool = False) -> list[WeightSlice]:
        """Return the slices of the layout with one tensor per parameter; ``transposed``: its matrices are [in, out]."""
        count, shapes, slices = self.config.num_experts, self.stack_shapes, []
        for expert in range(count):
            for one in self.matrices(expert):
                shape, into, dim, scales = shapes[one.stack], one.into, one.dim, one.scales
                if transposed:
                    shape, into, dim, scales = shape[::-1], into.T, 1 - dim, None
                name, start = f"{path}.{one.stack}", one.row + one.start
                slices.append(WeightSlice(name, (count, *shape), into, dim, start, index=expert, scales=scales))
        return slices

    def matrices(self, expert: int) -> list[ExpertMatrix]:
        """Return the gate, up and down matrices of ``expert``."""
        size, hidden, start = self.config.intermediate_size, self.hidden_size, self.shard.features[0]
        gate, up = self.local_part("gate_up_proj", expert, dim=0).chunk(2)
        down = self.local_part("down_proj", expert, dim=1)
        scales, names = self._scales_of(expert), self.config.parts
        return [
            ExpertMatrix(names[0], "gate_up_proj", 0, (size, hidden), gate, 0, start, scales[0]),
            ExpertMatrix(names[1], "gate_up_proj", size, (size, hidden), up, 0, start, scales[1]),
            ExpertMatrix(names[2], "down_proj", 0, (hidden, size), down, 1, start, scales[2]),
        ]

    def local_part(self, stack: str, expert: int, dim: int) -> Tensor:
        """Return a view of this rank's part of an expert's matrix in ``stack``; ranks split the matrix along ``dim``.

        For an expert of another rank the result is empty, so that the names and shapes of its tensors are still
        checked.
        """
        weight: Tensor = getattr(self, stack)
        if 0 <= expert - self.first < self.num_local:
            return weight[expert - self.first]
        rows, columns = self.stack_shapes[stack]
        return weight.new_empty((0, columns) if dim == 0 else (rows, 0), dtype=torch.float32)

    def _scales_of(self, expert: int) -> Sequence[Scales | None]:
        """Return the scales of an expert's gate, up and down; None for matrices that are not quantized or not local."""
        local = expert - self.first
        if not self.kept or self.scales is None or not 0 <= local < self.num_local:
            return None, None, None
        views: list[Scales | None] = []
        for name in ("gate_up_proj", "down_proj"):
            zero = self.zeros[name][local] if name in self.zeros else None
            views += self.kept[name].layout.scales_of(self.scales[name][local], zero)
        return views

    def slices_of_stacks(self, layout: Sequence[WeightSlice]) -> Iterator[dict[str, Sequence[WeightSlice]]]:
        """Yield for each local expert its slices by stack; ``layout`` is one of :meth:`layouts`."""
        for expert in range(self.first, self.first + self.num_local):
            gate, up, down = layout[3 * expert : 3 * expert + 3]
            yield {"gate_up_proj": (gate, up), "down_proj": (down,)}


class UngatedExperts(Experts):
    """This rank's shard of transformers' NemotronHExperts: sum of weight * down(act(up(x))) over each token's experts.

    `up_proj` is [experts, features, hidden], `down_proj` [experts, hidden, features].
    """

    may_quantize = False
    num_up = 1

    def __init__(
        self, config: MoeConfig, hidden_size: int, activation: str, tp: TensorParallel, dtype: torch.dtype
    ) -> None:
        super().__init__(config, hidden_size, activation, tp, dtype)
        features = self.shard.features[1] - self.shard.features[0]
        self.up_proj = linear_weight(self.num_local, features, hidden_size, dtype=dtype)
        del self.gate_up_proj

    @property
    def stacks(self) -> Mapping[str, Sequence[str]]:
        """The two parameters, each with one matrix per expert."""
        return {"up_proj": ("up_proj",), "down_proj": ("down_proj",)}

    def gate_up(self, pairs: Tensor, ends: Tensor) -> Tensor:
        """Compute up of ``pairs`` [pairs, hidden], sorted by expert -> [pairs, features]."""
        return self.product(pairs, "up_proj", ends)

    def activated(self, gate_up: Tensor) -> Tensor:
        """Apply the activation to [pairs, features]."""
        active: Tensor = self.act_fn(gate_up)
        return active

    def matrices(self, expert: int) -> list[ExpertMatrix]:
        """Return the up and down matrices of ``expert``."""
        size, hidden, start = self.config.intermediate_size, self.hidden_size, self.shard.features[0]
        up, down = self.local_part("up_proj", expert, dim=0), self.local_part("down_proj", expert, dim=1)
        return [
            ExpertMatrix("up_proj", "up_proj", 0, (size, hidden), up, 0, start),
            ExpertMatrix("down_proj", "down_proj", 0, (hidden, size), down, 1, start),
        ]


class PairActivation(Activation):
    """Activation of (token, expert) pairs, sorted by expert."""

    tap_dims: dict[str, str] = {"in[input]": "pair h[tp]", "out": "pair h[tp]"}  # noqa: RUF012  (read-only by contract)


@contextmanager
def excluding_padding(is_padding: Tensor | None, experts: Sequence[Experts]) -> Iterator[None]:
    """Context manager: ``experts`` skip padding rows.

    ``is_padding`` [tokens, 1] bool: the padding rows must be last, so that pairs of tokens keep the places that they
    have without padding, followed by the pairs of padding. None: no row is padding.
    """
    for each in experts:
        each.is_padding = is_padding
    try:
        yield
    finally:
        for each in experts:
            each.is_padding = None


def _zero_foreign(pairs: Tensor, is_foreign: Tensor | None) -> Tensor:
    """Return ``pairs`` with the undefined rows of foreign pairs set to zero."""
    return pairs if is_foreign is None else pairs.masked_fill(is_foreign, 0)


def in_block(path: str, block: str) -> str:
    """Replace the last ``mlp`` in ``path`` with ``block``, the name of the block in the checkpoint."""
    head, separator, tail = path.rpartition(".mlp.")
    return f"{head}.{block}.{tail}" if separator else path
