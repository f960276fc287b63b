"""SitePort: the state of one port of a tap across firings."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tapscope.core import dtypes
from tapscope.core.errors import DimsError
from tapscope.dumper.records.dtensor_dims import Placement, dims_of
from tapscope.dumper.records.firing import json_text
from tapscope.dumper.records.record_layout import NO_LAYOUT, RecordLayout
from tapscope.dumper.records.snapshot import dtype_name
from tapscope.dumper.selection.selection import CaptureSpec, SiteDecision
from tapscope.dumper.steps.open_step import OpenStep
from tapscope.dumper.steps.row_slicing import Ranges, SlicedTensor, slice_rows
from tapscope.kernels.native import library, summary

if TYPE_CHECKING:
    from tapscope.dumper.records.sketcher import DevicePlace

_MAX_LAYOUTS = 256  # limits the memory of a port whose shapes never repeat


class DeviceSketch(NamedTuple):
    """Parameters for the device to sketch tensors of one layout, cached from the last tensor."""

    members: str
    """:attr:`.RecordLayout.members` of the layout; with ``grid``, the cache key of ``place``."""
    grid: tuple[int, ...]
    """Grid of the step's token rows, see :class:`tapscope.core.observe.StepInfo`; empty without token rows."""
    place: "DevicePlace"


class SitePort:
    """One port of a tap, with the decision of the rules and cached layouts."""

    __slots__ = (
        "announced",
        "decision",
        "device_sketch",
        "dims",
        "grad",
        "has_reported",
        "keep",
        "latest",
        "layouts",
        "may_keep",
        "model",
        "model_text",
        "module_info",
        "parts",
        "placement",
        "row_set",
        "site",
        "site_text",
    )

    def __init__(
        self,
        site: str,
        decision: SiteDecision,
        module_info: dict[str, Any],
        dims: str | None = None,
        row_set: str | None = None,
        model: str = "",
    ) -> None:
        """Create the port of ``site``.

        ``module_info`` are the fields of its ``site`` line about the module; ``dims`` is the unchecked annotation;
        ``row_set`` names the row set in :attr:`.StepInfo.row_sets` that its tensors cover, if not all rows.
        """
        self.site = site
        self.site_text = json_text(site)
        self.model = model
        self.model_text = f',"model":{json_text(model)}' if model else ""
        self.decision = decision
        self.may_keep = decision.static is None or decision.may_keep
        self.module_info = module_info
        self.dims = dims
        self.row_set = row_set
        self.placement: Placement | None = None
        """Mesh placement of plain tensors that are shards; set before the first firing."""
        self.announced = False
        """Whether the ``site`` line was sent."""
        self.has_reported = False
        self.keep = _plain_keep(decision.static)
        """Capture level of all tensors of this port if it is unconditional; None otherwise."""
        self.device_sketch: DeviceSketch | None = None
        """Sketch parameters of the last tensor on a device."""
        self.grad: SitePort | None = None
        """Port of the gradient, if it may be kept."""
        self.parts: dict[str, SitePort] = {}
        """Part name -> port, for tensors that consist of several dense tensors, e.g. sparse ones."""
        self.latest = NO_LAYOUT
        """Layout of the last unsliced tensor; usually also that of the next one."""
        self.layouts: dict[tuple[Any, ...], RecordLayout] = {}
        """(dtype, shape, slicing) -> layout."""

    def site_line(self) -> dict[str, Any]:
        """Return the ``site`` line."""
        return {"type": "site", "site": self.site, **self.module_info} | ({"dims": self.dims} if self.dims else {})

    def part_of(self, name: str) -> "SitePort":
        """Return the port of a part, e.g. ``out[values]`` for ``values`` of ``out``; the same rules apply to it."""
        port = self.parts.get(name)
        if port is None:
            value = self.site.removesuffix(".grad")
            grad = self.site[len(value) :]
            site = f"{value[:-1]}.{name}]" if value.endswith("]") else f"{value}[{name}]"
            port = self.parts[name] = SitePort(site + grad, self.decision, self.module_info, model=self.model)
        return port

    def rows_in(self, step: OpenStep) -> Ranges | None:
        """Return the slots of the step's grid that an unsliced tensor covers, if the module declares a row set."""
        return None if self.row_set is None else step.row_ranges.get(self.row_set)

    def slice(self, tensor: torch.Tensor, step: OpenStep, spec: CaptureSpec) -> SlicedTensor:
        """Return the slice of ``tensor`` that ``spec`` keeps; raises ValueError like :func:`slice_rows`."""
        if spec.rows is None and spec.requests is None:
            return SlicedTensor(tensor, self.rows_in(step), None)
        row_set = step.info.row_sets.get(self.row_set) if self.row_set else None
        return slice_rows(tensor, step.info, row_set, spec.rows, spec.requests)

    def layout(
        self,
        part: SlicedTensor,
        cap: int | None,
        report: Callable[[str, str], None],
        placement: Placement | None = None,
    ) -> RecordLayout:
        """Return the layout of a sliced tensor, from a cache if possible.

        Dims that do not match its shape are omitted, and ``report`` is called with (site, reason).
        """
        tensor = part.tensor
        what = (part.rows, part.slice, cap, placement)
        whole = what[1:] == (None,) * 3
        key = (tensor.dtype, tensor.shape, what)
        layout = self.layouts.get(key)
        if layout is None:
            if len(self.layouts) >= _MAX_LAYOUTS:
                self.layouts.clear()
            layout = self._make_layout(part, cap, report, placement or self.placement)
            if whole and self.keep is not None and self.decision.triggers is None:
                layout = layout._replace(template=self._template(layout))
            self.layouts[key] = layout
        if whole:
            self.latest = layout
        return layout

    def _template(self, layout: RecordLayout) -> Any:
        """Return the template for lines of the native writer; None if the writer does not support the layout."""
        functions, plan = library.functions(), summary.plan_of(layout.dtype)
        if functions is None or plan is None or layout.dtype in dtypes.COMPLEX:  # may be lazily conjugated
            return None
        code, _, width = plan
        head, tail = f',"site":{self.site_text},"step":'.encode(), f"{self.model_text}{layout.members}".encode()
        return functions.record_template(head, tail, layout.torch_dtype, layout.torch_shape, layout.count, width, code)

    def _make_layout(
        self, part: SlicedTensor, cap: int | None, report: Callable[[str, str], None], placement: Placement | None
    ) -> RecordLayout:
        dtype, shape = dtype_name(part.tensor), list(part.tensor.shape)
        members: dict[str, Any] = {"dtype": dtype, "shape": shape}
        if self.dims is not None or placement:
            try:
                members["dims"] = dims_of(self.dims, tuple(shape), placement or (), flattened=part.rows is not None)
            except DimsError as error:
                report(self.site, str(error))
        if part.rows is not None:
            members["rows"] = part.rows
        if part.slice is not None:
            members["slice"] = part.slice._asdict()
        if cap is not None:
            members["cap"] = cap
        tensor, count = part.tensor, part.tensor.numel()
        text, nbytes = "," + json_text(members)[1:-1], count * tensor.element_size()
        return RecordLayout(text, dtype, shape, count, nbytes, tensor.dtype, tensor.shape, part.rows)


def _plain_keep(spec: CaptureSpec | None) -> str | None:
    if spec is None or spec.keep == "off" or spec != CaptureSpec(spec.keep):
        return None
    return spec.keep
