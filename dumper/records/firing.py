"""Firing: one firing of a site: step, occurrence, microbatch, pass and tags."""

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
    """The step it belongs to; for a gradient, the step of its forward."""
    occurrence: int
    micro: int = 0
    pass_: str = FORWARD
    tags: Mapping[str, Any] | None = None

    def members(self) -> str:
        """Members of the record line from ``occurrence`` to ``pass``; defaults are left out."""
        text = f',"occurrence":{self.occurrence}' if self.occurrence else ""
        if self.micro:
            text += f',"micro":{self.micro}'
        return text if self.pass_ == FORWARD else f'{text},"pass":"{self.pass_}"'


def rule_context(leaf: Any, firing: Firing) -> RuleContext:
    """The names of ``leaf`` that conditions may read; a value that is not a tensor has neither dtype nor size."""
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
    """The JSON text of a value."""
    return _encode(value)
