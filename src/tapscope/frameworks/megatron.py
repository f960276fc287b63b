"""Megatron-core: its process groups."""

from tapscope.core.framework_plugin import FrameworkPlugin, ProcessLayout
from tapscope.frameworks.parallel_state import layout_of


class MegatronPlugin(FrameworkPlugin):
    """Models of megatron.core."""

    name = "megatron"

    def layout(self) -> ProcessLayout | None:
        """Sizes and ranks of the groups in ``megatron.core.parallel_state``."""
        return layout_of("megatron.core.parallel_state")
