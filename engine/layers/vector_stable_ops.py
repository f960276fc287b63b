"""vector_stable: elementwise functions whose result for an element does not depend on its position in the tensor.

On a CPU, torch computes most of a tensor with vector instructions and the remainder of each thread's part with scalar
instructions. The two differ in the last bit for exp, log, sin and similar functions.
"""

from collections.abc import Callable

import torch
from torch import Tensor

_VECTORS = 64  # elements: a multiple of the width of any processor's unrolled vector loop
_SERIAL = 16384  # elements: below the size that torch splits among threads


def vector_stable(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return ``function(x)``, computed in full vectors only; ``x`` has any shape, the result is a new tensor."""
    if x.device.type != "cpu":
        return function(x)
    flat = x.reshape(-1)
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % _VECTORS))
    if torch.get_num_threads() == 1 or len(padded) <= _SERIAL:
        values = function(padded)
    else:
        values = torch.cat([function(part) for part in torch.split(padded, _SERIAL)])
    return values[: len(flat)].view(x.shape)
