"""RecordLayout: dtype, shape and size of a recorded tensor, with the corresponding text of the record line."""

from typing import Any, NamedTuple

import torch

from tapscope.dumper.steps.row_slicing import Ranges


class RecordLayout(NamedTuple):
    """Layout of the tensors at a port, computed once and reused until it changes."""

    members: str
    """JSON fields of the record line from ``dtype`` to ``cap``."""
    dtype: str
    shape: list[int]
    count: int  # type: ignore[assignment]
    """Number of elements."""
    nbytes: int
    torch_dtype: torch.dtype | None = None
    """Dtype of the recorded torch tensor; None for a value that is not a tensor."""
    torch_shape: tuple[int, ...] = ()
    """Shape of the recorded torch tensor."""
    rows: Ranges | None = None
    """Slots of the step's grid that the leading axis covers, if the record line has ``rows``."""
    template: Any = None
    """Template for the native line writer; None if the native writer does not support this layout."""


NO_LAYOUT = RecordLayout("", "", [], 0, 0)
"""Layout of a value that is not a tensor."""
