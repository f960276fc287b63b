"""An inference engine for Hugging Face checkpoints, built for observability.

    from tapscope.engine import LLM

    with LLM("path/to/llama") as llm:
        print(llm.generate(["The quick brown fox"], max_new_tokens=16)[0].text)

Names load on first use: importing this package alone does not import torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tapscope.engine.llm import LLM
    from tapscope.engine.params.engine_config import EngineConfig
    from tapscope.engine.params.sampling_params import SamplingParams
    from tapscope.engine.requests.request import Generation

__all__ = ["LLM", "EngineConfig", "Generation", "SamplingParams"]

_MODULES = {
    "LLM": "llm",
    "EngineConfig": "params.engine_config",
    "Generation": "requests.request",
    "SamplingParams": "params.sampling_params",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    from tapscope.core.extras import requiring

    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    with requiring(f"{__name__}.{name}", "engine"):
        value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
