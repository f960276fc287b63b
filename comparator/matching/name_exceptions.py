"""Name exceptions: sites with the name of another framework's site but different values."""

import re

from tapscope.comparator.runs.hints import Hints

_MASK = re.compile(r":in\[(?:attention_)?mask\]$")
_NORM = re.compile(r"(?:^|\.)(?:input_layernorm|pre_mlp_layernorm):out")
IDENTITIES = ("Identity", "IdentityOp", "IdentityFuncOp")


def are_masks_inverted(hints: tuple[Hints, Hints]) -> bool:
    """Whether exactly one of two frameworks is Megatron, whose attention masks mark hidden positions."""
    frameworks = {one.framework for one in hints}
    return len(frameworks) > 1 and "megatron" in frameworks


def is_mask(name: str) -> bool:
    """Whether it is an attention mask given to a module."""
    return _MASK.search(name) is not None


def name_exception(name: str, cls: str) -> str:
    """Why a site, by its name and its module's class, must not match the same name of another framework; else empty."""
    if cls == "Conv1D" and ":param[weight]" in name:
        return "not compared: a Conv1D stores its weight transposed"
    if cls in IDENTITIES and _NORM.search(name):
        return "not compared: a copy of its input, not a norm; the next linear normalises"
    if "LayerNorm" in cls and "Linear" in cls and ":in[" in name:
        return "not compared: this linear normalises its input first; the other run's takes the output of a norm"
    return ""
