"""GatedMLP: the MLP of a dense layer, with Hugging Face's module names."""

import torch
from torch import Tensor, nn

from tapscope.engine.distributed.sharding import Shard
from tapscope.engine.distributed.tensor_parallel import TensorParallel
from tapscope.engine.hf_config.model_config import ModelConfig
from tapscope.engine.layers.activation import Activation
from tapscope.engine.layers.fused import fused_for, product_kernels
from tapscope.engine.layers.linear import FusedLinear, RowParallelLinear, quantizer_of
from tapscope.engine.layers.probe import SHARD, WHOLE, Probe, is_watched, notify


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)), arXiv:2002.05202, over this rank's shard of the intermediate features."""

    def __init__(self, config: ModelConfig, size: int, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__()
        shard = Shard.of(size, tp)
        parts = {"gate_proj": shard, "up_proj": shard}
        self.gate_up_proj = FusedLinear(config.hidden_size, parts, config.mlp_bias, dtype)
        self.gate_proj, self.up_proj = Probe(SHARD), Probe(SHARD)
        self.act_fn = Activation(config.activation)
        self.down_proj = RowParallelLinear(shard, config.hidden_size, config.mlp_bias, tp, dtype)
        self.tap_dims = {"in[x]": WHOLE, "out": WHOLE}

    @property
    def first_linear(self) -> FusedLinear:
        """The linear layer that consumes the input."""
        return self.gate_up_proj

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        product = self._fused_product(x)
        output: Tensor = self.down_proj(self._product(x) if product is None else product)
        return output

    def _product(self, x: Tensor) -> Tensor:
        """Compute act(gate(x)) * up(x)."""
        gate, up = self.gate_up_proj(x)
        if (fused := fused_for(x, self.gate_proj, self.up_proj, self.act_fn)) is not None:
            active = torch.empty_like(gate, memory_format=torch.contiguous_format) if is_watched(self.act_fn) else None
            quantizer = quantizer_of(self.down_proj)
            quantized = None if quantizer is None else quantizer.offer(gate)
            fused_product: Tensor = fused.gated(gate, up, self.act_fn.name, active=active, quantized=quantized)
            if quantizer is not None:
                quantizer.keep(fused_product, quantized)
            notify(self.gate_proj, gate, gate)
            if active is not None:
                notify(self.act_fn, active, gate)
            notify(self.up_proj, up, up)
            return fused_product
        active, up = self.act_fn(self.gate_proj(gate)), self.up_proj(up)
        product: Tensor = active * up if is_watched(self.act_fn) else active.mul_(up)
        return product

    def _fused_product(self, x: Tensor) -> Tensor | None:
        """Compute :meth:`_product` with one kernel; return None if not applicable or if a fused module is watched."""
        linear, modules = self.gate_up_proj, (self.gate_up_proj, self.gate_proj, self.up_proj, self.act_fn)
        fused = product_kernels(x, *modules) if linear.is_plain else None
        if fused is None or self.act_fn.name not in fused.split_linear.KINDS or any(map(is_watched, modules)):
            return None
        if not fused.split_linear.is_worth_it(x, linear.weight):
            return None
        product: Tensor = fused.split_linear.split_linear(
            x, linear.weight, linear.bias, self.act_fn.name, is_constant=True
        )
        return product
