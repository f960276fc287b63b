"""RecordLayout: dtype, shape and size of a recorded tensor, with the text that its record line has for them."""

from typing import Any, NamedTuple

import torch

from tapscope.dumper.steps.row_slicing import Ranges


class RecordLayout(NamedTuple):
    """The layout of the tensors at a port, computed once and reused while it does not change."""

    members: str
    """Members of the record line from ``dtype`` to ``cap``."""
    dtype: str
    shape: list[int]
    count: int  # type: ignore[assignment]
    """Number of elements."""
    nbytes: int
    torch_dtype: torch.dtype | None = None
    """With ``torch_shape``: of the tensor that was recorded."""
    torch_shape: tuple[int, ...] = ()
    rows: Ranges | None = None
    """Slots of the step's grid that the leading axis holds, if the line names them."""
    template: Any = None
    """The native template of such lines; None where the native writer cannot write them."""


NO_LAYOUT = RecordLayout("", "", [], 0, 0)
"""Of a value that is not a tensor."""
