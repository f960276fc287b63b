"""RoutingReplay: replays recorded expert ids of requests in place of the routers' choices."""

import base64

import numpy as np
import torch
from torch import Tensor

from tapscope.engine.models.decoder import CausalLM
from tapscope.engine.requests.step_plan import StepPlan


class RoutingReplay:
    """Passes the recorded expert ids of each step to the routers of one model."""

    def __init__(self, model: CausalLM, device: torch.device) -> None:
        self._model, self._device = model, device
        self._is_active = False

    def begin(self, plan: StepPlan) -> None:
        """Set the recorded expert ids for the rows of ``plan``, the next step."""
        if plan.has_experts:
            self._is_active = True
            self._model.replay_experts(self._expert_ids(plan))
        else:
            self.end()

    def end(self) -> None:
        """Return to the routers' own choices."""
        if self._is_active:
            self._is_active = False
            self._model.replay_experts(None)

    def _expert_ids(self, plan: StepPlan) -> Tensor:
        """Return expert ids [tokens, layers, k] int64, with -1 where the router chooses."""
        config = self._model.config
        assert config.moe is not None, "a model without experts has no requests with recorded ones"
        shape = config.num_layers, config.moe.top_k
        ids = np.full((plan.num_tokens, *shape), -1, dtype=np.int64)
        for first, item in zip(plan.slots, plan.scheduled, strict=True):
            if item.experts:
                rows = np.frombuffer(base64.b64decode(item.experts), "<i4").reshape(-1, *shape)
                ids[first : first + len(rows)] = rows
        return torch.from_numpy(ids).to(self._device)
