"""SitePort: one port of a tap, with what its firings have shown."""

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

_MAX_LAYOUTS = 256  # bounds the memory of a port whose shape never repeats


class DeviceSketch(NamedTuple):
    """How a device takes the sketches of tensors of one layout."""

    members: str
    """Of that layout, which determine the place in steps with :attr:`grid`."""
    grid: tuple[int, ...]
    """Of the steps' token rows, see :class:`tapscope.core.observe.StepInfo`; empty without."""
    place: "DevicePlace"


class SitePort:
    """One port of a tap: the state that outlives a firing."""

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
        """``module_info``: members of its ``site`` line about the module; ``dims``: as annotated, unchecked."""
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
        """The placement on the mesh, where plain tensors here are shards; set before the first one comes."""
        self.announced = False
        """Whether its ``site`` line was sent."""
        self.has_reported = False
        self.keep = _plain_keep(decision.static)
        """What is kept of every tensor here when no further condition applies; else None."""
        self.device_sketch: DeviceSketch | None = None
        """How a device took the sketch of the last tensor."""
        self.grad: SitePort | None = None
        """The port of its gradient, if that may be kept."""
        self.parts: dict[str, SitePort] = {}
        """The ports of a tensor's parts, when it is not one piece of memory."""
        self.latest = NO_LAYOUT
        """Of the last whole tensor: the next one usually has the same."""
        self.layouts: dict[tuple[Any, ...], RecordLayout] = {}
        """(dtype, shape, slicing) -> layout."""

    def site_line(self) -> dict[str, Any]:
        """Its ``site`` line."""
        return {"type": "site", "site": self.site, **self.module_info} | ({"dims": self.dims} if self.dims else {})

    def part_of(self, name: str) -> "SitePort":
        """The port of a part: ``out`` and ``values`` make ``out[values]``; the rules of the whole apply to it."""
        port = self.parts.get(name)
        if port is None:
            value = self.site.removesuffix(".grad")
            grad = self.site[len(value) :]
            site = f"{value[:-1]}.{name}]" if value.endswith("]") else f"{value}[{name}]"
            port = self.parts[name] = SitePort(site + grad, self.decision, self.module_info, model=self.model)
        return port

    def rows_in(self, step: OpenStep) -> Ranges | None:
        """Slots of the step's grid that a whole tensor here holds, if the module declares a row set."""
        return None if self.row_set is None else step.row_ranges.get(self.row_set)

    def slice(self, tensor: torch.Tensor, step: OpenStep, spec: CaptureSpec) -> SlicedTensor:
        """The part of the tensor that ``spec`` keeps; raises ValueError, see :func:`slice_rows`."""
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
        """The layout of a part; dims that do not fit its shape are reported and left out."""
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
        """The constant parts of the native writer's lines; None where it cannot write them."""
        functions, plan = library.functions(), summary.plan_of(layout.dtype)
        if functions is None or plan is None or layout.dtype in dtypes.COMPLEX:  # these may be conjugated lazily
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
