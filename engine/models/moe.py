"""Mixture-of-experts models with Hugging Face's module names: sparse blocks, Mixtral, Qwen2-MoE and Qwen3-MoE."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from tapscope.engine.distributed.tensor_parallel import TensorParallel
from tapscope.engine.hf_config.model_config import ModelConfig
from tapscope.engine.layers.experts import Experts
from tapscope.engine.layers.linear import ReplicatedLinear
from tapscope.engine.layers.probe import WHOLE
from tapscope.engine.layers.routers import Qwen3MoeRouter, Router, TopKRouter
from tapscope.engine.models.decoder import CausalLM, DecoderLayer
from tapscope.engine.models.mlp import GatedMLP


class SparseMoeBlock(nn.Module):
    """Routed experts plus the shared expert, if the model has one."""

    def __init__(self, config: ModelConfig, router: type[Router], tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__()
        assert config.moe is not None, "a sparse block needs ModelConfig.moe"
        self.experts = Experts(config.moe, config.hidden_size, config.activation, tp, dtype)
        self.gate = router(config.moe, config.hidden_size, dtype)
        size = config.moe.shared_size
        self.shared_experts = GatedMLP(config, size, tp, dtype) if size else None
        self.tap_dims = {"in[hidden_states]": WHOLE, "out": WHOLE}

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        _, weights, chosen = self.gate(hidden_states)
        output: Tensor = self.experts(hidden_states, chosen, weights)
        return output if self.shared_experts is None else output + self.shared_experts(hidden_states)


class Qwen2MoeSparseMoeBlock(nn.Module):
    """Routed experts plus sigmoid(shared_expert_gate(x)) times the output of a shared expert.

    Counterpart of transformers' class of the same name.
    """

    def __init__(self, config: ModelConfig, router: type[Router], tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__()
        assert config.moe is not None, "a sparse block needs ModelConfig.moe"
        self.gate = router(config.moe, config.hidden_size, dtype)
        self.experts = Experts(config.moe, config.hidden_size, config.activation, tp, dtype)
        self.shared_expert = GatedMLP(config, config.moe.shared_size, tp, dtype)
        self.shared_expert_gate = ReplicatedLinear(config.hidden_size, 1, False, dtype)
        self.tap_dims = {"in[hidden_states]": WHOLE, "out": WHOLE}

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        shared: Tensor = self.shared_expert(hidden_states)
        _, weights, chosen = self.gate(hidden_states)
        output: Tensor = self.experts(hidden_states, chosen, weights)
        weight: Tensor = self.shared_expert_gate(hidden_states).sigmoid()
        return output + weight * shared


class MoeDecoderLayer(DecoderLayer):
    """Layer with a sparse MoE block, or with a dense MLP if in ``config.moe.dense_layers``."""

    router: ClassVar[type[Router]] = TopKRouter
    block: ClassVar[type[SparseMoeBlock | Qwen2MoeSparseMoeBlock]] = SparseMoeBlock

    def make_mlp(self, config: ModelConfig, layer: int, tp: TensorParallel, dtype: torch.dtype) -> nn.Module:
        """Create the ``mlp`` module of layer ``layer``."""
        if config.moe is None or layer in config.moe.dense_layers:
            return super().make_mlp(config, layer, tp, dtype)
        return self.block(config, self.router, tp, dtype)


class MoeCausalLM(CausalLM):
    """Causal LM with mixture-of-experts layers."""

    layer_class: ClassVar[type[DecoderLayer]] = MoeDecoderLayer

    def routed_experts(self) -> Tensor | None:
        """Return the expert ids of the last step's rows, [layers, tokens, k] int64; None before the first step.

        Dense layers have ids of -1.
        """
        chosen = [None if router is None else router.chosen for router in self._routers()]
        seen = next((ids for ids in chosen if ids is not None), None)
        if seen is None:
            return None
        none = torch.full_like(seen, -1)
        return torch.stack([none if ids is None else ids for ids in chosen])

    def replay_experts(self, ids: Tensor | None) -> None:
        """Use the experts ``ids`` [tokens, layers, k] int64 in the next step.

        An id of -1 keeps the router's choice; None keeps all of them.
        """
        for layer, router in enumerate(self._routers()):
            if router is not None:
                router.replayed = None if ids is None else ids[:, layer]
        for module in self.modules():
            if isinstance(module, Experts):
                module.may_repeat = ids is not None

    def _routers(self) -> list[Router | None]:
        """Return the router of each layer; None for dense layers."""
        layers = [module for module in self.modules() if isinstance(module, DecoderLayer)]
        return [next((m for m in layer.modules() if isinstance(m, Router)), None) for layer in layers]


class MixtralForCausalLM(MoeCausalLM):
    """Mixtral, arXiv:2401.04088; transformers' `modeling_mixtral.py`."""


class Qwen2MoeDecoderLayer(MoeDecoderLayer):
    """Counterpart of transformers' Qwen2MoeDecoderLayer."""

    router = Qwen3MoeRouter
    block = Qwen2MoeSparseMoeBlock


class Qwen2MoeForCausalLM(MoeCausalLM):
    """Qwen1.5-MoE and Qwen2-MoE, arXiv:2407.10671; transformers' `modeling_qwen2_moe.py`."""

    layer_class = Qwen2MoeDecoderLayer


class Qwen3MoeDecoderLayer(MoeDecoderLayer):
    """Counterpart of transformers' Qwen3MoeDecoderLayer."""

    router = Qwen3MoeRouter


class Qwen3MoeForCausalLM(MoeCausalLM):
    """Qwen3-MoE, arXiv:2505.09388; transformers' `modeling_qwen3_moe.py`."""

    layer_class = Qwen3MoeDecoderLayer
