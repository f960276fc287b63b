"""Port: one port of a tap, as far as its firings have shown."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tapscope import dims
from tapscope.dumper.capture import dtype_name
from tapscope.dumper.cut import Part, cut
from tapscope.dumper.rules import Choice, Taking
from tapscope.dumper.stamp import quoted
from tapscope.dumper.steps import OpenStep
from tapscope.errors import DimsError

_encode = quoted
_MAX_LAYOUTS = 256  # a port whose shape never repeats must not grow for ever


class Layout(NamedTuple):
    """How a tensor lies there, as members of the record's line from ``dtype`` to ``cap``."""

    text: str
    dtype: str
    shape: list[int]


class Port:
    """What does not change from one firing to the next."""

    __slots__ = (
        "about",
        "announced",
        "choice",
        "complained",
        "dims",
        "may_keep",
        "model",
        "model_text",
        "row_set",
        "site",
        "site_text",
        "_layouts",
    )

    def __init__(
        self,
        site: str,
        choice: Choice,
        about: dict[str, Any],
        annotation: str | None = None,
        row_set: str | None = None,
        model: str = "",
    ) -> None:
        """``about`` says of the module what its ``site`` line tells; ``annotation`` are its dims, not yet checked."""
        self.site = site
        self.site_text = quoted(site)
        self.model = model
        self.model_text = f',"model":{quoted(model)}' if model else ""
        self.choice = choice
        self.may_keep = choice.static is None or choice.static.keep != "off"
        self.about = about
        self.dims = annotation
        self.row_set = row_set
        self.announced = False
        """Whether its ``site`` line was sent."""
        self.complained = False
        self._layouts: dict[tuple[torch.dtype, torch.Size, Any], Layout] = {}

    def line(self) -> dict[str, Any]:
        """Its ``site`` line."""
        return {"type": "site", "site": self.site, **self.about} | ({"dims": self.dims} if self.dims else {})

    def part(self, tensor: torch.Tensor, step: OpenStep, taking: Taking) -> Part:
        """What ``taking`` keeps of the tensor; raises ValueError, see :func:`cut`."""
        if taking.rows is None and taking.requests is None:
            return Part(tensor, step.row_ranges.get(self.row_set) if self.row_set else None, None)
        row_set = step.info.row_sets.get(self.row_set) if self.row_set else None
        return cut(tensor, step.info, row_set, taking.rows, taking.requests)

    def layout(self, part: Part, cap: int | None, complain: Callable[[str, str], None]) -> Layout:
        """The layout of a part; dims that do not fit its shape are complained of and left out."""
        key = (part.tensor.dtype, part.tensor.shape, (part.rows, part.slice, cap))
        found = self._layouts.get(key)
        if found is None:
            if len(self._layouts) >= _MAX_LAYOUTS:
                self._layouts.clear()
            found = self._layouts[key] = self._make(part, cap, complain)
        return found

    def _make(self, part: Part, cap: int | None, complain: Callable[[str, str], None]) -> Layout:
        dtype, shape = dtype_name(part.tensor), list(part.tensor.shape)
        members: dict[str, Any] = {"dtype": dtype, "shape": shape}
        if self.dims is not None:
            try:
                dims.parse(self.dims).check(tuple(shape))
                members["dims"] = self.dims
            except DimsError as error:
                complain(self.site, str(error))
        if part.rows is not None:
            members["rows"] = part.rows
        if part.slice is not None:
            members["slice"] = part.slice._asdict()
        if cap is not None:
            members["cap"] = cap
        return Layout("," + _encode(members)[1:-1], dtype, shape)
