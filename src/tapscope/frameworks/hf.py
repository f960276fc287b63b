"""transformers: facts about its models that shapes do not reveal, and ``TapscopeCallback`` for its Trainer."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tapscope.core.errors import MissingExtraError
from tapscope.core.framework_plugin import FrameworkPlugin, ModuleFacts

_HEADS = frozenset({"lm_head", "embed_out"})
_LOGITS = "logits"
_WITH_METHODS = "Gemma3nTextAltUp"
"""Class whose methods are called in place of ``forward``."""
_BY_LAYER = "_adapter_list."
"""Path component in Zamba2's shared blocks, which hold the adapters of all layers; each layer calls only its own."""
_ADAPTER = re.compile(r"\blora_\w+\.")
"""Path component of PEFT adapter modules. An adapter is not called while another is active, or if it adapts a bare
parameter."""
_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "OptimizedModule")


class TransformersPlugin(FrameworkPlugin):
    """Plugin for transformers models, including models wrapped by PEFT, DDP or FSDP.

    As for every PyTorch model, token rows are inferred from the arguments (``input_ids``, ``attention_mask``,
    ``past_key_values``, ``logits_to_keep``), and dims from the placements of DTensor parameters.
    """

    name = "transformers"
    oldest = "4.52"

    def owns(self, model: Any) -> bool:
        """Return whether ``model`` is a transformers model or a wrapper around one."""
        inner = model
        while type(inner).__name__ in _WRAPPERS and hasattr(inner, "module"):
            inner = inner.module
        config = getattr(inner, "config", None)
        return any(each.__module__.startswith("transformers.configuration") for each in type(config).__mro__)

    def step_modules(self, model: Any) -> Sequence[str]:
        """Return submodules that the host may call in place of the root.

        These are the model inside a wrapper, which ``generate()`` of a PEFT model calls directly, and the parts of a
        multimodal model, such as the vision tower, which a host may call to cache their outputs.
        """
        inside = [(path, module) for path, module in model.named_modules() if path]
        parts = [path for path, module in inside if _is_model(module)]
        heads = [path for path, module in inside if _has_head(module)]
        return tuple(dict.fromkeys([*heads, *(parts if len(parts) > 1 else ())]))  # a single part: an LM's decoder

    def module_facts(self, path: str, module: Any, parent: Any) -> ModuleFacts:
        """Return facts about a module: logits are computed for the last position only, and some modules are never
        called."""
        is_optional = (
            _BY_LAYER in path
            or _ADAPTER.search(path) is not None
            or type(module).__name__ == _WITH_METHODS
            or _may_be_fused(path, module, parent)
        )
        facts = replace(super().module_facts(path, module, parent), is_optional=is_optional)
        if path.rpartition(".")[2] in _HEADS:
            ports = [f"in[{name}]" for name in ("input", "x", "hidden_states")]
            return replace(facts, row_sets=dict.fromkeys((*ports, "out"), _LOGITS))
        return replace(facts, row_sets={"out[logits]": _LOGITS}) if not path or _has_head(module) else facts


def _may_be_fused(path: str, module: Any, parent: Any) -> bool:
    """Return whether the module is fused into a function or kernel call and therefore may not be called.

    True for a causal convolution, whose weights are passed to a function or kernel, and for parts the kernel may
    include: the activation after it and Mamba's step-size projection ``dt_proj``.
    """
    is_fused_part = path.rpartition(".")[2] in ("act", "dt_proj")
    conv: Any = getattr(parent, "conv1d", None) if is_fused_part else module
    return type(conv).__name__ == "Conv1d" and conv.groups == conv.in_channels > 1


def _is_model(module: Any) -> bool:
    return any(each.__name__ == "PreTrainedModel" for each in type(module).__mro__)


def _has_head(module: Any) -> bool:
    return any(name in _HEADS for name, _ in module.named_children())


def __getattr__(name: str) -> Any:
    """Import ``TapscopeCallback`` lazily, because it needs transformers."""
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
