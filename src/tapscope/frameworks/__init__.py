"""Framework plugins: how vLLM, SGLang, Megatron-core and transformers describe their models, batches and processes.

A plugin of your own derives from :class:`FrameworkPlugin`; see :mod:`tapscope.core.framework_plugin`.
"""

from tapscope.core.framework_plugin import FrameworkPlugin, ModuleFacts, ProcessLayout, StepRows

__all__ = ["FrameworkPlugin", "ModuleFacts", "ProcessLayout", "StepRows"]
