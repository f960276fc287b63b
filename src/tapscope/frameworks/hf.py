"""transformers: what shapes do not tell about its models; ``TapscopeCallback`` for its Trainer."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tapscope.core.errors import MissingExtraError
from tapscope.core.framework_plugin import FrameworkPlugin, ModuleFacts

_HEADS = frozenset({"lm_head", "embed_out"})
_LOGITS = "logits"
_WITH_METHODS = "Gemma3nTextAltUp"
"""Class whose methods are called in place of its forward."""
_BY_LAYER = "_adapter_list."
"""In paths of Zamba2's shared blocks: they hold the adapters of all layers, and each layer calls its own."""
_ADAPTER = re.compile(r"\blora_\w+\.")
"""In paths of PEFT: an adapter's modules are not called while another one is active, or if they adapt a parameter."""
_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "OptimizedModule")


class TransformersPlugin(FrameworkPlugin):
    """Models of transformers, also inside the wrappers of PEFT, DDP and FSDP.

    As for every PyTorch model, token rows come from the arguments (``input_ids``, ``attention_mask``,
    ``past_key_values``, ``logits_to_keep``) and dims from the placements of DTensor parameters.
    """

    name = "transformers"
    oldest = "4.52"

    def owns(self, model: Any) -> bool:
        """Whether it is a model of transformers, or a wrapper around one."""
        inner = model
        while type(inner).__name__ in _WRAPPERS and hasattr(inner, "module"):
            inner = inner.module
        config = getattr(inner, "config", None)
        return any(each.__module__.startswith("transformers.configuration") for each in type(config).__mro__)

    def step_modules(self, model: Any) -> Sequence[str]:
        """The model inside a wrapper, which ``generate()`` of a PEFT model calls in place of the wrapper; and the parts
        of a multimodal model, such as its vision tower, which a host may call to cache their outputs."""
        inside = [(path, module) for path, module in model.named_modules() if path]
        parts = [path for path, module in inside if _is_model(module)]
        heads = [path for path, module in inside if _has_head(module)]
        return tuple(dict.fromkeys([*heads, *(parts if len(parts) > 1 else ())]))  # one part: the decoder of an LM

    def module_facts(self, path: str, module: Any, parent: Any) -> ModuleFacts:
        """``generate()`` asks for the logits of the last position only; some modules are used without being called."""
        is_optional = (
            _BY_LAYER in path
            or _ADAPTER.search(path) is not None
            or type(module).__name__ == _WITH_METHODS
            or _is_in_function(path, module, parent)
        )
        facts = replace(super().module_facts(path, module, parent), is_optional=is_optional)
        if path.rpartition(".")[2] in _HEADS:
            ports = [f"in[{name}]" for name in ("input", "x", "hidden_states")]
            return replace(facts, row_sets=dict.fromkeys((*ports, "out"), _LOGITS))
        return replace(facts, row_sets={"out[logits]": _LOGITS}) if not path or _has_head(module) else facts


def _is_in_function(path: str, module: Any, parent: Any) -> bool:
    """Whether it is a causal convolution, whose weights go to a function or kernel, or what that may include: the
    activation after it, and the step sizes of Mamba."""
    is_beside = path.rpartition(".")[2] in ("act", "dt_proj")
    conv: Any = getattr(parent, "conv1d", None) if is_beside else module
    return type(conv).__name__ == "Conv1d" and conv.groups == conv.in_channels > 1


def _is_model(module: Any) -> bool:
    return any(each.__name__ == "PreTrainedModel" for each in type(module).__mro__)


def _has_head(module: Any) -> bool:
    return any(name in _HEADS for name, _ in module.named_children())


def __getattr__(name: str) -> Any:
    """``TapscopeCallback``, which needs transformers, is imported when it is asked for."""
    if name != "TapscopeCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from tapscope.frameworks.hf_trainer import TapscopeCallback
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise MissingExtraError(
            "TapscopeCallback needs transformers, which is not installed; install the extra: pip install 'tapscope[hf]'"
        ) from None
    return TapscopeCallback
