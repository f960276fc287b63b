"""Port: one port of a tap, as far as its firings have shown."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tapscope.core.errors import DimsError
from tapscope.dumper.records.dtensor_dims import Placed, dims_of
from tapscope.dumper.records.firing import quoted
from tapscope.dumper.records.record_template import stencil_of
from tapscope.dumper.records.snapshot import dtype_name
from tapscope.dumper.selection.selection import Choice, Taking
from tapscope.dumper.steps.open_step import OpenStep
from tapscope.dumper.steps.row_slicing import Part, Ranges, cut

_encode = quoted
_MAX_LAYOUTS = 256  # a port whose shape never repeats must not grow for ever


class Layout(NamedTuple):
    """How a tensor lies there, as members of the record's line from ``dtype`` to ``cap``."""

    text: str
    dtype: str
    shape: list[int]
    count: int  # type: ignore[assignment]
    """Elements."""
    nbytes: int
    kind: torch.dtype | None = None
    """With ``size``: of the tensor that was recorded."""
    size: tuple[int, ...] = ()
    rows: Ranges | None = None
    """Slots of the step's grid that the leading axis holds, where the text names them."""
    stencil: Any = None
    """For a pen, where it may write the lines of tensors that lie so."""


NO_LAYOUT = Layout("", "", [], 0, 0)
"""Of a value that is no tensor."""


class Port:
    """What does not change from one firing to the next."""

    __slots__ = (
        "about",
        "announced",
        "choice",
        "complained",
        "dims",
        "grad",
        "inner",
        "keep",
        "latest",
        "layouts",
        "may_keep",
        "model",
        "model_text",
        "placed",
        "row_set",
        "site",
        "site_text",
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
        self.may_keep = choice.static is None or choice.may_keep
        self.about = about
        self.dims = annotation
        self.row_set = row_set
        self.placed: Placed | None = None
        """How the whole lies over the mesh, where plain tensors here are shards; settled before the first comes."""
        self.announced = False
        """Whether its ``site`` line was sent."""
        self.complained = False
        self.keep = _plain_keep(choice.static)
        """What is kept of every tensor here, where nothing else need be asked; else None."""
        self.grad: Port | None = None
        """The port of its gradient, where that may be kept."""
        self.inner: dict[str, Port] = {}
        """Parts of a tensor that is not one piece of memory."""
        self.latest = NO_LAYOUT
        """Of the last whole tensor: the next one mostly lies so too."""
        self.layouts: dict[tuple[Any, ...], Layout] = {}
        """(dtype, shape, what is unusual) -> layout."""

    def line(self) -> dict[str, Any]:
        """Its ``site`` line."""
        return {"type": "site", "site": self.site, **self.about} | ({"dims": self.dims} if self.dims else {})

    def part_of(self, name: str) -> "Port":
        """The port of a part: ``out`` and ``values`` make ``out[values]``; the rules of the whole hold for it."""
        found = self.inner.get(name)
        if found is None:
            value = self.site.removesuffix(".grad")
            grad = self.site[len(value) :]
            site = f"{value[:-1]}.{name}]" if value.endswith("]") else f"{value}[{name}]"
            found = self.inner[name] = Port(site + grad, self.choice, self.about, model=self.model)
        return found

    def rows_in(self, step: OpenStep) -> Ranges | None:
        """Slots of the step's grid that a whole tensor here holds, where the module has said so."""
        return None if self.row_set is None else step.row_ranges.get(self.row_set)

    def part(self, tensor: torch.Tensor, step: OpenStep, taking: Taking) -> Part:
        """What ``taking`` keeps of the tensor; raises ValueError, see :func:`cut`."""
        if taking.rows is None and taking.requests is None:
            return Part(tensor, self.rows_in(step), None)
        row_set = step.info.row_sets.get(self.row_set) if self.row_set else None
        return cut(tensor, step.info, row_set, taking.rows, taking.requests)

    def layout(
        self, part: Part, cap: int | None, complain: Callable[[str, str], None], placed: Placed | None = None
    ) -> Layout:
        """The layout of a part; dims that do not fit its shape are complained of and left out."""
        tensor = part.tensor
        about = (part.rows, part.slice, cap, placed)
        whole = about[1:] == (None,) * 3
        key = (tensor.dtype, tensor.shape, about)
        found = self.layouts.get(key)
        if found is None:
            if len(self.layouts) >= _MAX_LAYOUTS:
                self.layouts.clear()
            found = self._make(part, cap, complain, placed or self.placed)
            if whole and self.keep is not None and self.choice.sentinel is None:
                found = found._replace(stencil=stencil_of(self, found))
            self.layouts[key] = found
        if whole:
            self.latest = found
        return found

    def _make(self, part: Part, cap: int | None, complain: Callable[[str, str], None], placed: Placed | None) -> Layout:
        dtype, shape = dtype_name(part.tensor), list(part.tensor.shape)
        members: dict[str, Any] = {"dtype": dtype, "shape": shape}
        if self.dims is not None or placed:
            try:
                members["dims"] = dims_of(self.dims, tuple(shape), placed or (), flattened=part.rows is not None)
            except DimsError as error:
                complain(self.site, str(error))
        if part.rows is not None:
            members["rows"] = part.rows
        if part.slice is not None:
            members["slice"] = part.slice._asdict()
        if cap is not None:
            members["cap"] = cap
        tensor, count = part.tensor, part.tensor.numel()
        text, nbytes = "," + quoted(members)[1:-1], count * tensor.element_size()
        return Layout(text, dtype, shape, count, nbytes, tensor.dtype, tensor.shape, part.rows)


def _plain_keep(taking: Taking | None) -> str | None:
    if taking is None or taking.keep == "off" or taking != Taking(taking.keep):
        return None
    return taking.keep
