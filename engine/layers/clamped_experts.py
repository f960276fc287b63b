"""ClampedExperts: the experts of gpt-oss, with biases, a clamped SwiGLU and weights in MXFP4."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from tapscope.engine.checkpoint.mxfp4 import BLOCK, BLOCKS, SCALES, dequantize_mxfp4
from tapscope.engine.checkpoint.weight_loader import WeightSlice, parameter
from tapscope.engine.distributed.tensor_parallel import TensorParallel
from tapscope.engine.hf_config.moe_config import MoeConfig
from tapscope.engine.layers.experts import ROUTING_DIMS, Experts
from tapscope.engine.layers.fused import linear
from tapscope.engine.layers.probe import WHOLE
from tapscope.engine.layers.quantized import grouped_int4_product, runs_int4


class ClampedExperts(Experts):
    """This rank's shard of transformers' GptOssExperts.

    Rows of `gate_up_proj` [experts, 2 * features, hidden] alternate between gate and up, as in checkpoints. MXFP4
    weights may stay in MXFP4 in memory: a kernel reads the blocks, or an expert's matrix is dequantized, without
    rounding error, when the expert has tokens.
    """

    may_quantize = False

    def __init__(
        self, config: MoeConfig, hidden_size: int, activation: str, tp: TensorParallel, dtype: torch.dtype
    ) -> None:
        super().__init__(config, hidden_size, activation, tp, dtype)
        del self.act_fn
        first, end = self.shard.features
        self.features, self._adds_bias = end - first, first == 0
        self.gate_up_proj_bias = parameter(self.num_local, 2 * self.features, dtype=dtype)
        self.down_proj_bias = parameter(self.num_local, hidden_size, dtype=dtype)
        routing = dict.fromkeys(("in[router_indices]", "in[routing_weights]"), ROUTING_DIMS)
        self.tap_dims = {"in[hidden_states]": WHOLE, "out": WHOLE} | routing

    @property
    def stacks(self) -> Mapping[str, Sequence[str]]:
        """The two parameters, which files store only as stacks because gate and up rows alternate."""
        return {"gate_up_proj": (), "down_proj": ()}

    @property
    def up_rows(self) -> list[tuple[int, int]]:
        """First row and number of rows of this rank in an expert's ``gate_up_proj``."""
        return [(2 * self.shard.features[0], 2 * self.features)]

    def forward(self, hidden_states: Tensor, router_indices: Tensor, routing_weights: Tensor) -> Tensor:
        """Compute [tokens, hidden] from [tokens, hidden] and the expert ids and weights [tokens, k]."""
        return super().forward(hidden_states, router_indices, routing_weights)

    def gate_up(self, pairs: Tensor, ends: Tensor) -> Tensor:
        """Compute gate and up, with bias, of ``pairs`` [pairs, hidden] -> [pairs, 2 * features]."""
        return self.product(pairs, "gate_up_proj", ends) + self._bias_of(self.gate_up_proj_bias, len(pairs), ends)

    def activated(self, gate_up: Tensor) -> Tensor:
        """Compute (up + 1) * gate * sigmoid(alpha * gate), clamped: [pairs, 2 * features] -> [pairs, features]."""
        limit = self.config.swiglu_limit
        gate, up = gate_up[..., ::2].clamp(max=limit), gate_up[..., 1::2].clamp(min=-limit, max=limit)
        return (up + 1) * (gate * torch.sigmoid(gate * self.config.swiglu_alpha))

    def down(self, active: Tensor, ends: Tensor) -> Tensor:
        """Project [pairs, features] to [pairs, hidden]; only the rank with the first features adds the bias."""
        output = self.product(active, "down_proj", ends)
        return output + self._bias_of(self.down_proj_bias, len(active), ends) if self._adds_bias else output

    def keep_mxfp4(self, device: torch.device) -> None:
        """Allocate uninitialized MXFP4 blocks and scales, if this rank's matrices consist of whole blocks."""
        if self.features % BLOCK or self.hidden_size % BLOCK:
            return
        self.scales = nn.ParameterDict()
        for name in ("gate_up_proj", "down_proj"):
            stack, rows, columns = getattr(self, name).shape
            blocks, scales = (stack, rows, columns // BLOCK, BLOCK // 2), (stack, rows, columns // BLOCK)
            setattr(self, name, _uint8(*blocks, device=device))
            self.scales[name] = _uint8(*scales, device=device)

    def expert_product(
        self, codes: Tensor, scale: Tensor | None, group: int | None, name: str, expert: int, dtype: torch.dtype
    ) -> Tensor:
        """Multiply rows by one expert's matrix, dequantized from MXFP4 without rounding error."""
        assert self.scales is not None, "the experts are in MXFP4"
        return linear(codes, dequantize_mxfp4(getattr(self, name)[expert], self.scales[name][expert], dtype))

    def _runs_grouped(self, name: str, codes: Tensor, scale: Tensor | None) -> bool:
        assert self.scales is not None, "the experts are in MXFP4"
        return runs_int4(codes, self.scales[name].shape[2])

    def grouped_product(
        self, codes: Tensor, scale: Tensor | None, name: str, ends: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """Multiply rows by the MXFP4 matrices of all experts in one launch."""
        assert self.scales is not None, "the experts are in MXFP4"
        blocks = getattr(self, name).flatten(2)
        return grouped_int4_product(codes, blocks, self.scales[name], None, None, ends, self.most_rows(codes))

    def _bias_of(self, bias: Tensor, count: int, ends: Tensor) -> Tensor:
        """Return each pair's expert bias [count, outs]; rows of other ranks' experts get an arbitrary one."""
        if not self.num_local:
            return bias.new_zeros(1, bias.shape[1])
        rows = torch.arange(count, dtype=ends.dtype, device=ends.device)
        return bias[torch.searchsorted(ends, rows, right=True).clamp_(max=self.num_local - 1)]

    def layouts(self, path: str) -> Iterator[list[WeightSlice]]:
        """Yield the checkpoint layouts: dense matrices [in, out] as in transformers, and MXFP4 blocks with scales."""
        biases = list(self._biases(path))
        if self.scales is None:
            yield [*self._dense(path), *biases]
        yield [*self._blocks(path), *biases]

    def _biases(self, path: str) -> Iterator[WeightSlice]:
        count, size, start = self.config.num_experts, self.config.intermediate_size, self.shard.features[0]
        for expert in range(count):
            gate_up, down = (self._local(expert, bias) for bias in (self.gate_up_proj_bias, self.down_proj_bias))
            yield WeightSlice(f"{path}.gate_up_proj_bias", (count, 2 * size), gate_up, 0, 2 * start, index=expert)
            yield WeightSlice(f"{path}.down_proj_bias", (count, self.hidden_size), down, 0, 0, index=expert)

    def _dense(self, path: str) -> Iterator[WeightSlice]:
        count, size, start = self.config.num_experts, self.config.intermediate_size, self.shard.features[0]
        up_shape, down_shape = (count, self.hidden_size, 2 * size), (count, size, self.hidden_size)
        for expert in range(count):
            gate_up, down = self._local(expert, self.gate_up_proj), self._local(expert, self.down_proj, 1)
            yield WeightSlice(f"{path}.gate_up_proj", up_shape, gate_up.T, 1, 2 * start, index=expert)
            yield WeightSlice(f"{path}.down_proj", down_shape, down.T, 0, start, index=expert)

    def _blocks(self, path: str) -> Iterator[WeightSlice]:
        """Yield slices of MXFP4 blocks and scales, loaded unchanged or dequantized into dense weights."""
        start = self.shard.features[0]
        starts = {"gate_up_proj": (0, 2 * start), "down_proj": (1, start)}
        for name, (rows, columns) in self.stack_shapes.items():
            stacked = (self.config.num_experts, rows, columns // BLOCK)
            dim, first = starts[name]
            for expert in range(self.config.num_experts):
                weight = self._local(expert, getattr(self, name), dim)
                if self.scales is None:
                    scales = torch.empty(0, stacked[2], dtype=torch.uint8)  # loaded with the blocks
                    yield WeightSlice(f"{path}.{name}{SCALES}", stacked, scales, 0, 0, index=expert)
                else:
                    at = first // BLOCK if dim == 1 else first
                    scales = self._local(expert, self.scales[name], dim)
                    yield WeightSlice(f"{path}.{name}{SCALES}", stacked, scales, dim, at, index=expert)
                at = first if self.scales is None or dim == 0 else first // BLOCK
                yield WeightSlice(f"{path}.{name}{BLOCKS}", (*stacked, BLOCK // 2), weight, dim, at, index=expert)

    def _local(self, expert: int, stack: Tensor, dim: int = 0) -> Tensor:
        """Return the view of ``expert`` in ``stack``; for an expert of another rank, one of size 0 along ``dim``."""
        if 0 <= expert - self.first < self.num_local:
            return stack[expert - self.first]
        shape = stack.shape[1:]
        return stack.new_empty(*shape[:dim], 0, *shape[dim + 1 :])


def _uint8(*shape: int, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=torch.uint8, device=device), requires_grad=False)
