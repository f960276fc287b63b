"""LaunchedStep: a step whose kernels were launched, and whose tokens the host has not read yet."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tapscope.core.observe import StepInfo
from tapscope.engine.requests.step_plan import StepPlan


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """Result of :meth:`.ModelRunner.launch`, for :meth:`.ModelRunner.collect`."""

    plan: StepPlan
    tokens: Tensor | None
    """[logit rows] int64 on the host; None if only rank 0 has the tokens, because it samples."""
    copied: torch.cuda.Event | None
    """Recorded after the copy of ``tokens``; None if no copy is needed."""
    set_info: Callable[[StepInfo], None] | None = None
    """Passes the step's tokens to the observer, if the step was launched before its tokens were known."""
    info: StepInfo | None = None
    """Step info, without those tokens, that the observer received at launch."""
    sampled: Tensor | None = None
    """[logit rows] int64 on the device, valid until the next launch; None where ``tokens`` is None."""

    @property
    def is_done(self) -> bool:
        """Whether the device has computed the step, so that collecting it does not wait."""
        event: Any = self.copied
        return event is None or bool(event.query())
