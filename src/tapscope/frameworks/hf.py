"""transformers: what its models and ``generate()`` do that shapes do not tell."""

from dataclasses import replace
from typing import Any

from tapscope.core.framework_plugin import FrameworkPlugin, ModuleFacts

_HEADS = frozenset({"lm_head", "embed_out"})
_LOGITS = "logits"


class TransformersPlugin(FrameworkPlugin):
    """Models of transformers, also inside the wrappers of PEFT, DDP and FSDP.

    As for every PyTorch model, token rows come from the arguments (``input_ids``, ``attention_mask``,
    ``past_key_values``, ``logits_to_keep``) and dims from the placements of DTensor parameters.
    """

    name = "transformers"
    oldest = "4.52"

    def owns(self, model: Any) -> bool:
        """Whether it is a model of transformers, or a wrapper around one."""
        config = getattr(model, "config", None)
        return any(each.__module__.startswith("transformers.configuration") for each in type(config).__mro__)

    def module_facts(self, path: str, module: Any, parent: Any) -> ModuleFacts:
        """``generate()`` asks for the logits of the last position only."""
        facts = super().module_facts(path, module, parent)
        if path.rpartition(".")[2] in _HEADS:
            ports = [f"in[{name}]" for name in ("input", "x", "hidden_states")]
            return replace(facts, row_sets=dict.fromkeys((*ports, "out"), _LOGITS))
        return replace(facts, row_sets={"out[logits]": _LOGITS}) if not path else facts
