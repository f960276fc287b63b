"""A Hugging Face inference engine that is built to be looked into.

    from tapscope.engine import LLM

    with LLM("path/to/llama") as llm:
        print(llm.generate(["The quick brown fox"], max_new_tokens=16)[0].text)

Names load on first use: importing this package alone does not import torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tapscope.engine.config import EngineConfig
    from tapscope.engine.llm import LLM
    from tapscope.engine.request import Generation
    from tapscope.engine.sampling_params import SamplingParams

__all__ = ["LLM", "EngineConfig", "Generation", "SamplingParams"]

_HOMES = {"LLM": "llm", "EngineConfig": "config", "Generation": "request", "SamplingParams": "sampling_params"}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    from tapscope.extras import needing

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    with needing(f"{__name__}.{name}", "engine"):
        value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
