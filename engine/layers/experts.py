"""Experts: the feed-forward networks of a mixture of experts, split over ranks by expert and by feature.

Every rank sees every token (hidden states are whole on all ranks), computes the (token, expert) pairs whose experts it
holds, and the ranks' summands are added up: expert parallelism needs no exchange of tokens beyond that all-reduce.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function

from tapscope.engine.checkpoint.weight_loader import CheckpointModule, WeightSlice, parameter
from tapscope.engine.distributed.tensor_parallel import TensorParallel, span
from tapscope.engine.hf_config.moe_config import MoeConfig
from tapscope.engine.layers.activation import Activation
from tapscope.engine.layers.fused import fused_for, linear
from tapscope.engine.layers.probe import PARTIAL, WHOLE, Probe

ROUTING_DIMS = "t k # tp:replicated"
"""Dims of what a router says of each of a token's ``k`` experts."""
_ALIGNMENT = 16  # bytes: what grouped_mm asks of the rows of its operands


@dataclass(frozen=True, slots=True)
class ExpertShard:
    """Which experts, and which of their intermediate features, one rank holds: [start, end) of both."""

    experts: tuple[int, int]
    features: tuple[int, int]

    @classmethod
    def of(cls, tp: TensorParallel, config: MoeConfig) -> "ExpertShard":
        """Each of ``tp.ep`` groups of neighbouring ranks holds a block of experts and shares their features.

        Neither needs to divide: the last groups may hold fewer experts, the last ranks fewer features, or none.
        """
        group_size = tp.size // tp.ep
        group, member = divmod(tp.rank, group_size)
        return cls(span(config.num_experts, group, tp.ep), span(config.intermediate_size, member, group_size))


class Experts(CheckpointModule):
    """down(act(gate(x)) * up(x)) of each token's chosen experts, weighted and summed; this rank's share of it.

    Parameters are stacked as in transformers: `gate_up_proj` [experts, 2 * features, hidden], gate's rows first, and
    `down_proj` [experts, hidden, features].
    """

    may_quantize = True

    def __init__(
        self, config: MoeConfig, hidden_size: int, activation: str, tp: TensorParallel, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.config, self.hidden_size, self.tp = config, hidden_size, tp
        self.shard = ExpertShard.of(tp, config)
        self.first, end = self.shard.experts
        self.num_local = end - self.first
        self._is_whole = self.num_local == config.num_experts
        self._numbers = torch.arange(self.num_local)
        features = self.shard.features[1] - self.shard.features[0]
        self.gate_up_proj = parameter(self.num_local, 2 * features, hidden_size, dtype=dtype)
        self.down_proj = parameter(self.num_local, hidden_size, features, dtype=dtype)
        self.act_fn = PairActivation(activation)
        self.partial = Probe(PARTIAL)
        choices = dict.fromkeys(("in[top_k_index]", "in[top_k_weights]"), ROUTING_DIMS)
        self.tap_dims = {"in[hidden_states]": WHOLE, "out": WHOLE} | choices

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[tokens, hidden], expert ids and weights [tokens, k] -> [tokens, hidden].

        Pairs are sorted by expert, then token, so that one grouped GEMM serves all experts; a token's summands are
        added in the order of ``top_k_index``. Nothing here waits for the device.
        """
        num_tokens, top_k = top_k_index.shape
        order, ends, is_foreign = self._sort(top_k_index.flatten())
        gate_up = grouped_linear(hidden_states[order // top_k], self.gate_up_proj, ends)
        gate_up = _zero_foreign(gate_up, is_foreign)
        if (fused := fused_for(gate_up, self.act_fn)) is not None:
            active = fused.gated(gate_up, None, self.act_fn.name)
        else:
            gate, up = gate_up.chunk(2, dim=-1)
            active = self.act_fn(gate) * up
        down = _zero_foreign(grouped_linear(active, self.down_proj, ends), is_foreign)
        pairs = torch.empty_like(down).index_copy_(0, order, down).view(num_tokens, top_k, -1)
        summand = (pairs * top_k_weights.unsqueeze(-1)).sum(dim=1).to(hidden_states.dtype)
        return self.tp.all_reduce(self.partial(summand))

    @property
    def waits_for_host(self) -> bool:
        """Whether the products are computed expert by expert, by rows that the host has to know.

        torch's grouped_mm does that itself but for bfloat16 on GPUs of compute capability 9 and above.
        """
        weights = self.gate_up_proj, self.down_proj
        if any(weight.dtype != torch.bfloat16 or not _is_aligned(weight) for weight in weights):
            return True
        return weights[0].is_cuda and torch.cuda.get_device_capability(weights[0].device) < (9, 0)

    def _sort(self, experts: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Expert of each pair [n] -> pairs by expert, foreign ones last [n]; end of each expert's run; foreign [n, 1].

        Foreign pairs are those whose expert is on another rank; None where there can be none.
        """
        if not self._is_whole:
            experts = experts - self.first
            experts = experts.masked_fill((experts < 0) | (experts >= self.num_local), self.num_local)
        experts, order = torch.sort(experts, stable=True)
        ends = torch.searchsorted(experts, self._numbers, right=True, out_int32=True)
        return order, ends, None if self._is_whole else (experts == self.num_local).unsqueeze(-1)

    def layouts(self, path: str) -> Iterator[list[WeightSlice]]:
        """A matrix for each expert and part, as most checkpoints are, or stacked as the parameters are."""
        paths = dict.fromkeys((in_block(path, self.config.block), path))
        for stored in paths:
            yield list(self._each_matrix(stored))
        for stored in paths:
            yield list(self._stacked(stored))

    def _each_matrix(self, path: str) -> Iterator[WeightSlice]:
        size, start = self.config.intermediate_size, self.shard.features[0]
        up_shape, down_shape = (size, self.hidden_size), (self.hidden_size, size)
        for expert in range(self.config.num_experts):
            names = [f"{path}.{expert}.{part}.weight" for part in self.config.parts]
            gate, up, down = self._matrices(expert)
            yield WeightSlice(names[0], up_shape, gate, 0, start)
            yield WeightSlice(names[1], up_shape, up, 0, start)
            yield WeightSlice(names[2], down_shape, down, 1, start)

    def _stacked(self, path: str) -> Iterator[WeightSlice]:
        count, size, start = self.config.num_experts, self.config.intermediate_size, self.shard.features[0]
        up_shape, down_shape = (count, 2 * size, self.hidden_size), (count, self.hidden_size, size)
        for expert in range(count):
            gate, up, down = self._matrices(expert)
            yield WeightSlice(f"{path}.gate_up_proj", up_shape, gate, 0, start, index=expert)
            yield WeightSlice(f"{path}.gate_up_proj", up_shape, up, 0, size + start, index=expert)
            yield WeightSlice(f"{path}.down_proj", down_shape, down, 1, start, index=expert)

    def _matrices(self, expert: int) -> tuple[Tensor, Tensor, Tensor]:
        """Views of an expert's gate, up and down on this rank; without rows and columns when it is on another.

        Other ranks' experts are part of the checkpoint too: their names are known and their shapes are checked.
        """
        if not 0 <= expert - self.first < self.num_local:
            nothing = self.gate_up_proj.new_empty(0, self.hidden_size)
            return nothing, nothing, nothing.T
        gate, up = self.gate_up_proj[expert - self.first].chunk(2)
        return gate, up, self.down_proj[expert - self.first]


class PairActivation(Activation):
    """The activation of (token, expert) pairs, sorted by expert."""

    tap_dims: dict[str, str] = {"in[input]": "pair h[tp]", "out": "pair h[tp]"}  # noqa: RUF012  (read-only by contract)


def grouped_linear(input: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """[n, in] with [groups, out, in] -> [n, out]: rows [ends[g-1], ends[g]) by weight[g]; what follows is undefined.

    ``ends`` [groups] int32 stays on the device. Widths that grouped_mm does not take are multiplied group by group.
    """
    if has_torch_function((input,)):  # a mode such as BatchInvariant has its own
        return handle_torch_function(grouped_linear, (input,), input, weight, ends)
    width = weight.shape[1]
    if not (len(input) and weight.numel()):
        return input.new_zeros(len(input), width)
    if _is_aligned(weight):
        return functional.grouped_mm(input, weight.transpose(1, 2), offs=ends)
    output = input.new_empty(len(input), width)
    start = 0
    for matrix, end in zip(weight, ends.tolist(), strict=True):
        output[start:end] = linear(input[start:end], matrix)
        start = end
    return output


def _is_aligned(weight: Tensor) -> bool:
    """Whether grouped_mm takes matrices of these widths."""
    return all(size * weight.element_size() % _ALIGNMENT == 0 for size in weight.shape[1:])


def _zero_foreign(pairs: Tensor, is_foreign: Tensor | None) -> Tensor:
    """``pairs`` with zeros for those of other ranks, which nothing computed here."""
    return pairs if is_foreign is None else pairs.masked_fill(is_foreign, 0)


def in_block(path: str, block: str) -> str:
    """``path`` with its last ``mlp`` called ``block``, as a checkpoint may have it."""
    head, _, tail = path.rpartition(".mlp.")
    return f"{head}.{block}.{tail}"
