"""Routers: which experts each token goes to and with what weights, one class for each way models choose.

All return (logits [tokens, experts], weights [tokens, k], expert ids [tokens, k] int64) as transformers' do, so that
logits, weights and choices are sites of every router.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from tapscope.engine.experts import CHOICES, in_block
from tapscope.engine.layers.probe import WHOLE
from tapscope.engine.weights import Piece, Weighted

Routed = tuple[Tensor, Tensor, Tensor]
"""Logits, weights, expert ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How experts are chosen."""

    num_experts: int
    hidden_size: int
    top_k: int
    is_normalized: bool = True
    """Whether a token's weights are divided by their sum."""
    scale: float = 1.0
    """``routed_scaling_factor``: what weights are multiplied by in the end."""
    num_groups: int = 1
    top_groups: int = 1
    """Only the experts of the best ``top_groups`` of ``num_groups`` groups may be chosen."""
    block: str = "mlp"
    """As :attr:`tapscope.engine.experts.ExpertShape.block`."""


class Router(Weighted):
    """Whole on every rank: all must choose alike."""

    def __init__(self, routing: Routing, dtype: torch.dtype) -> None:
        super().__init__()
        self.routing = routing
        shape = (routing.num_experts, routing.hidden_size)
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
        self.chosen: Tensor | None = None
        """Expert ids of the last forward [tokens, k]."""
        logits = "t e # tp:replicated"
        self.tap_dims = {"in[hidden_states]": WHOLE, "out[0]": logits, "out[1]": CHOICES, "out[2]": CHOICES}

    def forward(self, hidden_states: Tensor) -> Routed:
        """[tokens, hidden] -> logits [tokens, experts], weights and expert ids [tokens, k]."""
        routed = self.route(hidden_states)
        self.chosen = routed[2]
        return routed

    def route(self, hidden_states: Tensor) -> Routed:
        """The choice itself."""
        raise NotImplementedError

    def layouts(self, path: str) -> Iterator[list[Piece]]:
        """The weight, whole, under the module's name in the checkpoint or here."""
        for stored in dict.fromkeys((in_block(path, self.routing.block), path)):
            yield list(self.pieces(stored))

    def pieces(self, path: str) -> Iterator[Piece]:
        """The weight, whole."""
        yield Piece(f"{path}.weight", tuple(self.weight.shape), self.weight)

    def _wide_logits(self, hidden_states: Tensor) -> Tensor:
        return functional.linear(hidden_states.float(), self.weight.float())


class TopKRouter(Router):
    """Softmax over all experts, then the ``top_k`` largest; transformers' MixtralTopKRouter, arXiv:2401.04088."""

    def route(self, hidden_states: Tensor) -> Routed:
        """Logits in the model's dtype, weights in float32."""
        logits = functional.linear(hidden_states, self.weight)
        weights, chosen = torch.topk(logits.softmax(dim=-1, dtype=torch.float32), self.routing.top_k, dim=-1)
        if self.routing.is_normalized:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return logits, weights, chosen


class Qwen3MoeRouter(TopKRouter):
    """The same with weights rounded to the model's dtype; transformers' Qwen3MoeTopKRouter, arXiv:2505.09388."""

    def route(self, hidden_states: Tensor) -> Routed:
        """Logits and weights in the model's dtype."""
        logits, weights, chosen = super().route(hidden_states)
        return logits, weights.to(logits.dtype), chosen


class DeepseekV2Router(Router):
    """Softmax in float32 within the groups of the best single experts; transformers' DeepseekV2TopkRouter.

    arXiv:2405.04434, section 2.2.2 (device-limited routing). Weights are never normalised there, only scaled.
    """

    def route(self, hidden_states: Tensor) -> Routed:
        """Logits and weights in float32."""
        logits = self._wide_logits(hidden_states)
        scores = logits.softmax(dim=-1)
        if self.routing.num_groups > 1:
            best = _by_group(scores, self.routing).amax(dim=-1)
            scores = scores.masked_fill(_outside(best, self.routing), 0.0)
        weights, chosen = torch.topk(scores, self.routing.top_k, dim=-1, sorted=False)
        return logits, weights * self.routing.scale, chosen


class DeepseekV3Router(Router):
    """Sigmoid scores, chosen by score plus a bias that balances load; transformers' DeepseekV3TopkRouter.

    arXiv:2412.19437, section 2.1.2. A group counts as much as its two best experts together; the bias chooses only,
    weights are the scores themselves.
    """

    e_score_correction_bias: Tensor

    def __init__(self, routing: Routing, dtype: torch.dtype) -> None:
        super().__init__(routing, dtype)
        self.register_buffer("e_score_correction_bias", torch.zeros(routing.num_experts))

    def route(self, hidden_states: Tensor) -> Routed:
        """Logits and weights in float32."""
        logits = self._wide_logits(hidden_states)
        scores = logits.sigmoid()
        merits = scores + self.e_score_correction_bias
        if self.routing.num_groups > 1:
            best = _by_group(merits, self.routing).topk(2, dim=-1).values.sum(dim=-1)
            merits = merits.masked_fill(_outside(best, self.routing), float("-inf"))
        chosen = torch.topk(merits, self.routing.top_k, dim=-1, sorted=False).indices
        weights = scores.gather(1, chosen)
        if self.routing.is_normalized:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return logits, weights * self.routing.scale, chosen

    def pieces(self, path: str) -> Iterator[Piece]:
        """Weight and bias, whole; the bias stays in float32."""
        yield from super().pieces(path)
        yield Piece(f"{path}.e_score_correction_bias", (self.routing.num_experts,), self.e_score_correction_bias)


def _by_group(scores: Tensor, routing: Routing) -> Tensor:
    """[tokens, experts] -> [tokens, groups, experts of each]."""
    return scores.view(len(scores), routing.num_groups, -1)


def _outside(best: Tensor, routing: Routing) -> Tensor:
    """Worth of each group [tokens, groups] -> whether each expert is in none of the best groups [tokens, experts]."""
    chosen = torch.topk(best, routing.top_groups, dim=-1, sorted=False).indices
    outside = torch.ones_like(best, dtype=torch.bool).scatter_(1, chosen, value=False)
    return outside.repeat_interleave(routing.num_experts // routing.num_groups, dim=-1)
