"""steady: an elementwise function whose value at an element does not depend on what stands around it.

On a CPU torch computes most of a tensor with vector instructions and the rest of it, at the end of each thread's
part, one by one; exp, log, sin and the like then differ in the last bit.
"""

from collections.abc import Callable

import torch
from torch import Tensor

_VECTORS = 64  # elements: a multiple of what any processor's unrolled vector loop takes at once
_SERIAL = 16384  # elements: below what torch divides among threads


def vector_stable(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``function(x)``, computed in whole vectors only; x of any shape, as a new tensor."""
    if x.device.type != "cpu":
        return function(x)
    flat = x.reshape(-1)
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % _VECTORS))
    if torch.get_num_threads() == 1 or len(padded) <= _SERIAL:
        values = function(padded)
    else:
        values = torch.cat([function(part) for part in torch.split(padded, _SERIAL)])
    return values[: len(flat)].view(x.shape)
