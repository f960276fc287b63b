"""Moment: what a rule's conditions may ask of one value."""

from typing import Any

import torch

from tapscope.dumper.records.firing import Firing
from tapscope.dumper.selection.selection import RuleContext


def rule_context(leaf: Any, firing: Firing) -> RuleContext:
    """The moment at which ``leaf`` came; a value that is no tensor has neither dtype nor size."""
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
        shape=_shape(leaf) if is_tensor else (),
        nbytes=leaf.numel() * leaf.element_size() if is_tensor else 0,
        tags=firing.tags or {},
        requests=step.requests,
    )


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """A nested tensor has no shape that a condition could ask for."""
    return () if tensor.is_nested else tuple(tensor.shape)
