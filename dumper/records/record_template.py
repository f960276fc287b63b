"""Stencil: what the lines of one port have in common while its values lie alike; a pen writes by it."""

from typing import TYPE_CHECKING, Any

from tapscope.core import dtypes
from tapscope.kernels.native import library, summary

if TYPE_CHECKING:
    from tapscope.dumper.records.site_port import RecordLayout, SitePort


def template_of(port: "SitePort", layout: "RecordLayout") -> Any:
    """What the lines of ``port`` have in common while its tensors lie so; None where no pen can write them."""
    functions, plan = library.functions(), summary.plan_of(layout.dtype)
    if functions is None or plan is None or layout.dtype in dtypes.COMPLEX:  # these may be conjugated lazily
        return None
    code, _, width = plan
    head, tail = f',"site":{port.site_text},"step":'.encode(), f"{port.model_text}{layout.members}".encode()
    return functions.stencil(head, tail, layout.torch_dtype, layout.torch_shape, layout.count, width, code)


def literal_template(port: "SitePort", value: Any, text: bytes) -> Any:
    """The same for a plain value (or all objects of a class), whose JSON is ``text``; None where there is no pen."""
    if (functions := library.functions()) is None:
        return None
    head, tail = f',"site":{port.site_text},"step":'.encode(), port.model_text.encode() + b',"value":' + text
    return functions.stencil(head, tail, value, (), 0, 0, -1)
