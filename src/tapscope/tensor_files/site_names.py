"""Sites of tensors named by a user's script.

A name with a dot is a module path and becomes a module site, so that it matches the sites of runs and name maps:
``model.layers.3.mlp.output`` is ``model.layers.3.mlp:out``, ``…q_proj.weight`` is ``…q_proj:param[weight]``. Any other
name becomes a tap, in the layer given by the name if any: ``layer_3_attn`` is ``layers.3:tap[layer_3_attn]``.
"""

import re

from tapscope.core.site import NUMBERED_LAYER, layer_of
from tapscope.sglang.filenames import clean_part

_PARAMETERS = frozenset(
    {"weight", "bias", "weight_scale", "weight_scale_inv", "input_scale", "e_score_correction_bias", "inv_freq"}
)
_MODULES = frozenset({"lm_head", "embed_tokens", "norm"})
"""Top-level modules of causal LMs whose names have no dot."""
_LAYER = re.compile(rf"(?:^|[._-]){NUMBERED_LAYER}(?=$|[._-])")
_INPUTS = re.compile(r"(?:(?P<path>.+?)\.)?inputs\.(?P<key>.+)")
_INPUT = re.compile(r"(?P<path>.+)\.(?:inputs?|in)(?:\.(?P<key>\d+))?")
_KEYS = r"\d+(?:\..+)?|(?:logits|last_hidden_state|hidden_states|attentions)(?:\..+)?"
"""Allowed suffixes of ``output``; others are module names, such as BERT's ``output.dense``."""
_OUTPUT = re.compile(rf"(?:(?P<path>.+)\.)?(?:outputs?|out)(?:\.(?P<key>{_KEYS}))?")
_TAP = re.compile(r"(?:(?P<path>.+?)\.)?(?P<kind>tap|buffer|param)\.(?P<key>.+)")


def site_of_tensor(name: str, layer: int | None = None) -> str:
    """Return the site of a tensor; ``layer`` is the layer given by the file path and is used unless the module path has
    a layer."""
    path, _, port = _site_of(name, layer).rpartition(":")
    if layer is not None and layer_of(path) is None:
        path = f"layers.{layer}.{path}" if path else f"layers.{layer}"
    return f"{path}:{port}"


def _site_of(name: str, layer: int | None) -> str:
    if name.endswith(".grad") and name != ".grad":
        return f"{_site_of(name.removesuffix('.grad'), layer)}.grad"
    path, _, last = name.rpartition(".")
    if path and last in _PARAMETERS:
        return f"{clean_part(path)}:param[{clean_part(last)}]"
    if match := _TAP.fullmatch(name):
        return f"{clean_part(match['path']) if match['path'] else ''}:{match['kind']}[{clean_part(match['key'])}]"
    if match := _OUTPUT.fullmatch(name):
        port = f":out[{clean_part(match['key'])}]" if match["key"] else ":out"
        return (clean_part(match["path"]) if match["path"] else "") + port
    if match := _INPUTS.fullmatch(name) or _INPUT.fullmatch(name):
        key = match["key"] or "0"
        port = f"in[{clean_part(f'args.{key}' if key[0].isdecimal() else key)}]"
        return f"{clean_part(match['path']) if match['path'] else ''}:{port}"
    if "." in name or name in _MODULES:
        return f"{clean_part(name)}:out"
    if layer is None and (numbered := _LAYER.search(name)):
        layer = int(numbered[1])
    return f"{'' if layer is None else f'layers.{layer}'}:tap[{clean_part(name)}]"


def name_of_site(site: str) -> str:
    """Return a name from which :func:`site_of_tensor` restores ``site``, if such a name exists."""
    grad = ".grad" if site.endswith(".grad") else ""
    path, _, port = site.removesuffix(".grad").rpartition(":")
    kind, _, key = port.partition("[")
    key = key.removesuffix("]")
    dotted = f"{path}." if path else ""
    if kind == "out":
        return f"{dotted}output" + (f".{key}" if key else "") + grad
    if kind == "in":
        return f"{dotted}inputs.{key.removeprefix('args.')}{grad}"
    if kind == "param" and key in _PARAMETERS:
        return f"{dotted}{key}{grad}"
    if not path and kind == "tap" and site_of_tensor(key) == site.removesuffix(".grad"):
        return f"{key}{grad}"
    return f"{dotted}{kind}.{key}{grad}"
