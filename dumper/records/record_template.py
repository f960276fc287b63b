"""Native record templates: the constant part of the record lines of one port."""

from typing import Any

from tapscope.core import dtypes
from tapscope.dumper.records.record_layout import RecordLayout
from tapscope.kernels.native import library, summary


def template_of(site_text: str, model_text: str, layout: RecordLayout) -> Any:
    """The template for tensors of this layout; None where the native writer cannot write their lines."""
    functions, plan = library.functions(), summary.plan_of(layout.dtype)
    if functions is None or plan is None or layout.dtype in dtypes.COMPLEX:  # these may be conjugated lazily
        return None
    code, _, width = plan
    head, tail = f',"site":{site_text},"step":'.encode(), f"{model_text}{layout.members}".encode()
    return functions.record_template(head, tail, layout.torch_dtype, layout.torch_shape, layout.count, width, code)


def literal_template(site_text: str, model_text: str, value: Any, text: bytes) -> Any:
    """The template for a plain value, or for all objects of a class, whose JSON is ``text``; None as above."""
    if (functions := library.functions()) is None:
        return None
    head, tail = f',"site":{site_text},"step":'.encode(), model_text.encode() + b',"value":' + text
    return functions.record_template(head, tail, value, (), 0, 0, -1)
