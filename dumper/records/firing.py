"""Firing: step, occurrence, microbatch, pass and tags of one firing of a site."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from tapscope.dumper.selection.rule_context import RuleContext
from tapscope.dumper.steps.open_step import OpenStep
from tapscope.run_format.record import FORWARD

_encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode


class Firing(NamedTuple):
    """One firing of a site."""

    step: OpenStep
    """Step of the firing; for a gradient, the step of its forward."""
    occurrence: int
    micro: int = 0
    pass_: str = FORWARD
    tags: Mapping[str, Any] | None = None

    def members(self) -> str:
        """Return the JSON fields of the record line from ``occurrence`` to ``pass``, omitting default values."""
        text = f',"occurrence":{self.occurrence}' if self.occurrence else ""
        if self.micro:
            text += f',"micro":{self.micro}'
        return text if self.pass_ == FORWARD else f'{text},"pass":"{self.pass_}"'


def rule_context(leaf: Any, firing: Firing) -> RuleContext:
    """Return the variables that the conditions of rules can read for ``leaf``; a non-tensor has no dtype and size 0."""
    step = firing.step
    is_tensor = isinstance(leaf, torch.Tensor)
    return RuleContext(
        step=step.info.step,
        phase=step.info.phase,
        micro=firing.micro,
        pass_=firing.pass_,
        occurrence=firing.occurrence,
        age=step.age,
        dtype=str(leaf.dtype).removeprefix("torch.") if is_tensor else None,
        shape=tuple(leaf.shape) if is_tensor and not leaf.is_nested else (),  # a nested tensor has no single shape
        nbytes=leaf.numel() * leaf.element_size() if is_tensor else 0,
        tags=firing.tags or {},
        requests=step.requests,
    )


def json_text(value: Any) -> str:
    """Encode a value as compact JSON; raises ValueError for a non-finite number."""
    return _encode(value)
