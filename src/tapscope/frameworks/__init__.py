"""Framework plugins: models, batches and process layouts of vLLM, SGLang, Megatron-core and transformers.

To write a plugin, derive from :class:`FrameworkPlugin`; see :mod:`tapscope.core.framework_plugin`.
"""

from tapscope.core.framework_plugin import FrameworkPlugin, ModuleFacts, ProcessLayout, StepRows

__all__ = ["FrameworkPlugin", "ModuleFacts", "ProcessLayout", "StepRows"]
