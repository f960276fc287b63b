"""Sites of tensors that a user's own script named.

Names with a dot are module paths and become sites of modules, so that they match those of runs and the name maps:
``model.layers.3.mlp.output`` is ``model.layers.3.mlp:out``, ``…q_proj.weight`` is ``…q_proj:param[weight]``. Any other
name is a tap, in its layer where the name has one: ``layer_3_attn`` is ``layers.3:tap[layer_3_attn]``.
"""

import re

from tapscope.sglang.filenames import clean_part

_PARAMETERS = frozenset(
    {"weight", "bias", "weight_scale", "weight_scale_inv", "input_scale", "e_score_correction_bias", "inv_freq"}
)
_MODULES = frozenset({"lm_head", "embed_tokens", "norm"})
"""Modules that a causal LM calls by a name without a dot."""
_LAYER = re.compile(r"(?:^|[._-])(?:layers?|blocks?|h)[._-]?(\d{1,5})(?=$|[._-])", re.IGNORECASE)
_INPUT = re.compile(r"(?P<path>.*?)\.?\b(?:inputs?|in)\b(?:[._](?P<key>[^.]+))?")
_OUTPUT = re.compile(r"(?P<path>.*?)\.?\b(?:outputs?|out)\b(?:[._](?P<key>[^.]+))?")


def site_of_tensor(name: str, layer: int | None = None) -> str:
    """The site of a tensor; ``layer`` where the path of its file says it."""
    if name.endswith(".grad") and name != ".grad":
        return f"{site_of_tensor(name.removesuffix('.grad'), layer)}.grad"
    path, _, last = name.rpartition(".")
    if path and last in _PARAMETERS:
        return f"{clean_part(path)}:param[{clean_part(last)}]"
    if found := _OUTPUT.fullmatch(name):
        port = f":out[{clean_part(found['key'])}]" if found["key"] else ":out"
        return (clean_part(found["path"]) if found["path"] else "") + port
    if (found := _INPUT.fullmatch(name)) and found["path"]:
        key = found["key"] or "args.0"
        return f"{clean_part(found['path'])}:in[{clean_part(f'args.{key}' if key.isdecimal() else key)}]"
    if "." in name or name in _MODULES:
        return f"{clean_part(name)}:out"
    if layer is None and (numbered := _LAYER.search(name)):
        layer = int(numbered[1])
    return f"{'' if layer is None else f'layers.{layer}'}:tap[{clean_part(name)}]"
