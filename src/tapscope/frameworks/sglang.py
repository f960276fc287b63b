"""SGLang: its process groups, and the dims of its layers."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

from tapscope.core.framework_plugin import FrameworkPlugin, ProcessLayout
from tapscope.frameworks.parallel_dims import layer_dims, named_forward
from tapscope.frameworks.parallel_state import call, layout_of

_STATE = "sglang.srt.distributed.parallel_state"
_AXES = {"tp": "tensor_model_parallel", "pp": "pipeline_model_parallel", "ep": "moe_expert_parallel"}


class SGLangPlugin(FrameworkPlugin):
    """Models and batches of sglang.srt."""

    name = "sglang"
    oldest = "0.4"

    def layout(self) -> ProcessLayout | None:
        """Sizes and ranks of the groups in ``sglang.srt.distributed.parallel_state``."""
        return layout_of(_STATE, _AXES)

    def module_dims(self, module: Any, parent: Any) -> Mapping[str, str]:
        """Of linears, embeddings, attention and gated activations that are split over tensor-parallel ranks."""
        return layer_dims(module, parent, _tp_size)

    def module_forward(self, module: Any) -> Callable[..., Any] | None:
        """Custom ops name their arguments in ``forward_native``."""
        return named_forward(module)


def _tp_size() -> int:
    return int(call(sys.modules.get(_STATE), "get_tensor_model_parallel_world_size") or 1)
