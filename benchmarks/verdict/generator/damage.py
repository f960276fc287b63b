"""Damage: one operation on a part of a tensor, as printable data."""

from dataclasses import dataclass

import torch
from torch import Tensor

OPERATIONS = ("scale", "zero", "negate", "add", "swap", "roll", "copy", "round", "clip")
ROUNDED = {"bfloat16": torch.bfloat16, "float8_e4m3": torch.float8_e4m3fn, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """An operation on a part of a tensor."""

    op: str
    axis: int = -1
    """Axis of the part: -1 is the features of an output, or the inputs of a weight."""
    start: int | None = None
    """First index of the part; None: the whole tensor."""
    count: int = 1
    stride: int = 1
    other: int = 0
    """First index of the part that is swapped with, or copied to, this one."""
    amount: float = 0.0
    """Factor, summand or limit; ``add`` and ``clip`` are in units of the tensor's rms."""
    dtype: str = ""
    """Dtype of ``round``."""

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return the damaged values as a new tensor of the same dtype; indices beyond the axis wrap."""
        values = tensor.detach().clone()
        axis = self.axis if values.ndim >= -self.axis else -1
        view = values.transpose(axis, -1)  # the part is now along the last axis
        size = view.shape[-1]
        if self.op == "roll":
            part = self._part(self.start or 0, size)
            view[..., part] = view[..., part.roll(1)]
        elif self.op in ("swap", "copy"):
            one, two = self._part(self.start or 0, size), self._part(self.other, size)
            kept = view[..., one].clone()
            view[..., one] = view[..., two]
            if self.op == "swap":
                view[..., two] = kept
        else:
            part = slice(None) if self.start is None else self._part(self.start, size)
            view[..., part] = self._changed(view[..., part], values)
        return values

    def _part(self, start: int, size: int) -> Tensor:
        count = min(self.count, size)
        return (start + self.stride * torch.arange(count)) % size

    def _changed(self, part: Tensor, whole: Tensor) -> Tensor:
        scale = float(whole.float().square().mean().sqrt())
        if self.op == "zero":
            return torch.zeros_like(part)
        if self.op == "negate":
            return -part
        if self.op == "scale":
            return part * self.amount
        if self.op == "add":
            return part + self.amount * scale
        if self.op == "clip":
            return part.clamp(-self.amount * scale, self.amount * scale)
        return part.to(ROUNDED[self.dtype]).to(part.dtype)

    @property
    def description(self) -> str:
        """Description, for example ``scale by 1.1 of 4 from 12 along axis -1``."""
        what = {"scale": f" by {self.amount:g}", "add": f" {self.amount:g} rms", "clip": f" at {self.amount:g} rms"}
        text = self.op + (f" to {self.dtype}" if self.dtype else what.get(self.op, ""))
        if self.start is None and self.op not in ("swap", "copy"):
            return text
        each = f" every {self.stride}th" if self.stride > 1 else ""
        other = f" with {self.other}" if self.op in ("swap", "copy") else ""
        return f"{text}: {self.count} from {self.start or 0}{each}{other} along axis {self.axis}"
