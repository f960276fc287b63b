"""Routers of mixture-of-experts layers: select the experts of each token and their weights.

All routers return (logits [tokens, experts], weights [tokens, k], expert ids [tokens, k] int64) as transformers'
routers do, so that all three are sites of every router.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from tapscope.engine.checkpoint.weight_loader import CheckpointModule, WeightSlice, parameter
from tapscope.engine.hf_config.moe_config import MoeConfig
from tapscope.engine.layers.experts import ROUTING_DIMS, in_block
from tapscope.engine.layers.fused import linear
from tapscope.engine.layers.probe import WHOLE

Routed = tuple[Tensor, Tensor, Tensor]
"""Logits, weights, expert ids."""


class Router(CheckpointModule):
    """Base class of routers, replicated so that all ranks select the same experts."""

    def __init__(self, config: MoeConfig, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.weight = parameter(config.num_experts, hidden_size, dtype=dtype)
        self.chosen: Tensor | None = None
        """Expert ids of the last forward [tokens, k]."""
        self.replayed: Tensor | None = None
        """Expert ids to replay [tokens, k]; a negative id leaves the choice to the router."""
        logits = "t e # tp:replicated"
        self.tap_dims = {"in[hidden_states]": WHOLE, "out[0]": logits, "out[1]": ROUTING_DIMS, "out[2]": ROUTING_DIMS}

    def forward(self, hidden_states: Tensor) -> Routed:
        """Route [tokens, hidden] -> logits [tokens, experts], weights and expert ids [tokens, k]; record the ids."""
        routed = self.route(hidden_states)
        self.chosen = routed[2]
        return routed

    def route(self, hidden_states: Tensor) -> Routed:
        """Compute the result of :meth:`forward`, without recording the ids in ``chosen``."""
        raise NotImplementedError

    def top(self, ranking: Tensor, scores: Tensor | None = None, *, is_sorted: bool = True) -> tuple[Tensor, Tensor]:
        """Return scores and ids [tokens, k] of the top experts by ``ranking`` [tokens, experts], or of replayed ones.

        ``scores`` [tokens, experts]: the scores to return, if they differ from the ranking.
        """
        values, chosen = torch.topk(ranking, self.config.top_k, dim=-1, sorted=is_sorted)
        if self.replayed is not None:
            chosen = torch.where(self.replayed >= 0, self.replayed, chosen)
        elif scores is None:
            return values, chosen
        return (ranking if scores is None else scores).gather(1, chosen), chosen

    def layouts(self, path: str) -> Iterator[list[WeightSlice]]:
        """Yield the whole weight under the block's name in the checkpoint, and under its name in this model."""
        for stored in dict.fromkeys((in_block(path, self.config.block), path)):
            yield list(self.weight_slices(stored))

    def weight_slices(self, path: str) -> Iterator[WeightSlice]:
        """Yield the whole weight."""
        yield WeightSlice(f"{path}.weight", tuple(self.weight.shape), self.weight)

    def _wide_logits(self, hidden_states: Tensor) -> Tensor:
        return linear(hidden_states.float(), self.weight.float())


class TopKRouter(Router):
    """Softmax over all experts, then the ``top_k`` largest; transformers' MixtralTopKRouter, arXiv:2401.04088."""

    def route(self, hidden_states: Tensor) -> Routed:
        """Return logits in the model's dtype, weights in float32."""
        logits = linear(hidden_states, self.weight)
        weights, chosen = self.top(logits.softmax(dim=-1, dtype=torch.float32))
        if self.config.is_normalized:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return logits, weights, chosen


class Qwen3MoeRouter(TopKRouter):
    """TopKRouter with weights rounded to the model's dtype; transformers' Qwen3MoeTopKRouter, arXiv:2505.09388."""

    def route(self, hidden_states: Tensor) -> Routed:
        """Return logits and weights in the model's dtype."""
        logits, weights, chosen = super().route(hidden_states)
        return logits, weights.to(logits.dtype), chosen


class DeepseekV2Router(Router):
    """Top-k of a float32 softmax, limited to the groups with the best experts; transformers' DeepseekV2TopkRouter.

    arXiv:2405.04434, section 2.2.2 (device-limited routing). As in transformers, weights are scaled but never
    normalized.
    """

    def route(self, hidden_states: Tensor) -> Routed:
        """Return logits and weights in float32."""
        logits = self._wide_logits(hidden_states)
        ranking = scores = logits.softmax(dim=-1)
        if self.config.num_groups > 1:
            best = _by_group(scores, self.config).amax(dim=-1)
            ranking = _limited(scores, best, self.config, 0.0)
        weights, chosen = self.top(ranking, scores, is_sorted=False)
        return logits, weights * self.config.scale, chosen


class DeepseekV3Router(Router):
    """Top-k of sigmoid scores plus a load-balancing bias; transformers' DeepseekV3TopkRouter.

    arXiv:2412.19437, section 2.1.2. A group's score is the sum of its two best experts; the bias affects the choice
    only, the weights are the unbiased scores.
    """

    e_score_correction_bias: Tensor

    def __init__(self, config: MoeConfig, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__(config, hidden_size, dtype)
        self.register_buffer("e_score_correction_bias", torch.zeros(config.num_experts))

    def route(self, hidden_states: Tensor) -> Routed:
        """Return logits and weights in float32."""
        logits = self._wide_logits(hidden_states)
        scores = logits.sigmoid()
        biased = scores + self.e_score_correction_bias
        if self.config.num_groups > 1:
            best = _by_group(biased, self.config).topk(2, dim=-1).values.sum(dim=-1)
            biased = _limited(biased, best, self.config, float("-inf"))
        weights, chosen = self.top(biased, scores, is_sorted=False)
        if self.config.is_normalized:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return logits, weights * self.config.scale, chosen

    def weight_slices(self, path: str) -> Iterator[WeightSlice]:
        """Yield the whole weight and bias; the bias stays in float32."""
        yield from super().weight_slices(path)
        yield WeightSlice(f"{path}.e_score_correction_bias", (self.config.num_experts,), self.e_score_correction_bias)


def _by_group(scores: Tensor, config: MoeConfig) -> Tensor:
    """View [tokens, experts] as [tokens, groups, experts per group]."""
    return scores.view(len(scores), config.num_groups, -1)


def _limited(scores: Tensor, group_scores: Tensor, config: MoeConfig, value: float) -> Tensor:
    """Set ``scores`` [tokens, experts] to ``value`` outside the top groups by ``group_scores`` [tokens, groups]."""
    chosen = torch.topk(group_scores, config.top_groups, dim=-1, sorted=False).indices
    outside = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, chosen, value=False)
    return _by_group(scores, config).masked_fill(outside.unsqueeze(-1), value).flatten(1)
