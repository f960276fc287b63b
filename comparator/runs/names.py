"""Names: map the module and port names of each framework to a common spelling.

A family is a list of rewrites to the common spelling, which is that of Hugging Face's Llama without its root. Two sites
match if their common spellings are equal. Supporting a new framework only takes a new family.
"""

import re
from collections.abc import Iterable
from functools import lru_cache

from msgspec import Struct

_NUMBER = re.compile(r"(?<![^.])\d+(?=[.:])")
"""A path component that is a number."""
_ANY = "0"
PARTIAL = ".partial"
"""Last path component of the probe that records the partial sums of a row-parallel layer before its all-reduce."""


class Rewrite(Struct, frozen=True):
    """A regular-expression rewrite of one spelling to the common one; ``pattern`` is anchored at a prefix or suffix."""

    pattern: str
    common: str

    def apply(self, site: str) -> str:
        """Return ``site`` in the common spelling, or unchanged if the pattern does not match."""
        return _compiled(self.pattern).sub(self.common, site, count=1)


class Family(Struct, frozen=True, eq=False):
    """The rewrites of one framework, applied in order."""

    name: str
    rewrites: tuple[Rewrite, ...]

    def common(self, site: str) -> str:
        """Return the site in the common spelling."""
        kind = _NUMBER.sub(_ANY, site)
        if (rewritten := _rewritten(kind, self)) == kind:
            return site
        numbers = iter(_NUMBER.findall(site))
        return _NUMBER.sub(lambda match: next(numbers, match[0]), rewritten)


@lru_cache(maxsize=1 << 16)
def _rewritten(site: str, family: Family) -> str:
    """Apply all rewrites to a site whose numbers are normalized.

    One cache entry serves the site in every layer and expert, because rewrites do not change numbers.
    """
    for rewrite in family.rewrites:
        site = rewrite.apply(site)
    return site


def _rewrites(*pairs: tuple[str, str]) -> tuple[Rewrite, ...]:
    return tuple(Rewrite(pattern, common) for pattern, common in pairs)


_compiled = lru_cache(maxsize=None)(re.compile)
"""Compiles on first use: two runs of one framework need no rewrites."""

# A tuple (tensor, None) flattens to out[0], where the same module of another framework returns the bare tensor. vLLM
# and SGLang call the position ids `positions`.
_PORT = _rewrites((r":out\[0\](?=$|\.grad$)", ":out"), (r":in\[positions\]$", ":in[position_ids]"))

_WRAPPER_NAMES = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", r"base_model\.model")
_WRAPPER = re.compile(rf"(?:^|(?<=\.))(?:{'|'.join(_WRAPPER_NAMES)})(?:\.|(?=:))|\.base_layer(?=[.:])")

# Wrappers of DDP, FSDP, torch.compile, activation checkpointing, Megatron's Float16Module and PEFT. A linear adapted by
# PEFT keeps its parameters in base_layer, whose output does not yet include the adapter.
_WRAPPERS = _rewrites(
    *[(rf"(?:^|(?<=\.)){name}(?:\.|(?=:))", "") for name in ("module", *_WRAPPER_NAMES)],
    (r"\.base_layer(?=:(?:param|buffer)\[)", ""),
)

# The decoder is at `model.` in a causal LM, at `model.language_model.` in a multimodal model, and at the root if it was
# captured alone. In vLLM and SGLang it returns plain hidden states.
_ROOT = _rewrites(
    (r"^(?:model|language_model\.model):out(?=$|\.grad$)", ":out[last_hidden_state]"),
    (r"^(?:model\.language_model|language_model\.model|model)(?=[.:])\.?", ""),
    (r"^(?:language_model\.)?logits_processor:out\[next_token_logits\]", "lm_head:out"),
    (r"^(?:language_model\.)?logits_processor(?=:out)", "lm_head"),
    (r"^(?:language_model\.)?logits_processor:in\[hidden_states\]", "lm_head:in[input]"),
)

# Megatron-core, GPTModel. Its decoder ends in the final norm. A TE layer contains its preceding norm, as a weight.
_MEGATRON = _rewrites(
    (r"^:out(?=$|\.grad$)", ":out[logits]"),
    (r"^decoder:out(?=$|\.grad$)", ":out[last_hidden_state]"),
    (r"^decoder\.final_(?:layer)?norm(?=:)", "norm"),
    (r"^embedding\.word_embeddings(?=:)", "embed_tokens"),
    (r"^output_layer(?=:)", "lm_head"),
    (r"^decoder\.layers\.", "layers."),
    (r"^(layers\.\d+)\.self_attention\.linear_qkv:param\[layer_norm_(weight|bias)\]", r"\1.input_layernorm:param[\2]"),
    (r"^(layers\.\d+)\.mlp\.linear_fc1:param\[layer_norm_(weight|bias)\]", r"\1.post_attention_layernorm:param[\2]"),
    (r"^(layers\.\d+)\.pre_mlp_layernorm(?=:)", r"\1.post_attention_layernorm"),
    (r"^(layers\.\d+)\.self_attention(?=[.:])", r"\1.self_attn"),
    (r"(?<=\.self_attn\.)linear_proj(?=:)", "o_proj"),
    (r"(?<=\.self_attn\.)linear_qkv(?=:)", "qkv_proj"),
    (r"(?<=\.self_attn\.)([qk])_layernorm(?=:)", r"\1_norm"),
    (r"(?<=\.self_attn\.)core_attention(?=:)", "attn"),
    (r"(?<=\.mlp\.experts\.)local_experts\.", ""),
    (r"(?<=\.mlp)\.router:param\[weight\]", ".gate:param[weight]"),
    (r"(?<=\.)linear_fc1(?=:)", "gate_up_proj"),
    (r"(?<=\.)linear_fc2(?=:)", "down_proj"),
)

# GPT-2, GPT-NeoX, BLOOM, Falcon, and Megatron before its core.
_GPT = _rewrites(
    (r"^(?:transformer|gpt_neox|language_model\.encoder)(?=[.:])\.?", ""),
    (r"^(?:wte|word_embeddings|embed_in|language_model\.embedding\.word_embeddings)(?=:)", "embed_tokens"),
    (r"^(?:ln_f|final_layer_?norm)(?=:)", "norm"),
    (r"^embed_out(?=:)", "lm_head"),
    (r"^h\.(?=\d)", "layers."),
    (r"^(layers\.\d+)\.(?:attn|attention|self_attention)(?=[.:])", r"\1.self_attn"),
    (r"^(layers\.\d+)\.ln_1(?=:)", r"\1.input_layernorm"),
    (r"^(layers\.\d+)\.ln_2(?=:)", r"\1.post_attention_layernorm"),
    (r"(?<=\.self_attn\.)(?:c_attn|query_key_value)(?=:)", "qkv_proj"),
    (r"(?<=\.self_attn\.)(?:c_proj|dense)(?=:)", "o_proj"),
    (r"(?<=\.mlp\.)(?:c_fc|dense_h_to_4h)(?=:)", "gate_up_proj"),
    (r"(?<=\.mlp\.)(?:c_proj|dense_4h_to_h)(?=:)", "down_proj"),
)

# Meta's Llama, torchtitan, InternLM2. Not wq and wk: their rows, and therefore their outputs, are in another order.
_META = _rewrites(
    (r"^tok_embeddings(?=:)", "embed_tokens"),
    (r"^output(?=:)", "lm_head"),
    (r"^(layers\.\d+)\.(?:attention_norm)(?=:)", r"\1.input_layernorm"),
    (r"^(layers\.\d+)\.(?:ffn_norm)(?=:)", r"\1.post_attention_layernorm"),
    (r"^(layers\.\d+)\.attention(?=[.:])", r"\1.self_attn"),
    (r"(?<=\.self_attn\.)wv(?=:)", "v_proj"),
    (r"(?<=\.self_attn\.)wo(?=:)", "o_proj"),
    (r"(?<=\.self_attn\.)wqkv(?=:)", "qkv_proj"),
    (r"^(layers\.\d+)\.feed_forward(?=[.:])", r"\1.mlp"),
    (r"(?<=\.mlp\.)w1(?=:)", "gate_proj"),
    (r"(?<=\.mlp\.)w2(?=:)", "down_proj"),
    (r"(?<=\.mlp\.)w3(?=:)", "up_proj"),
)

FAMILIES: tuple[Family, ...] = (
    Family("hf port", _PORT),
    Family("wrapper", (*_WRAPPERS, *_PORT)),
    Family("hf root", (*_PORT, *_ROOT)),
    Family("wrapper", (*_WRAPPERS, *_PORT, *_ROOT)),
    Family("megatron", (*_WRAPPERS, *_PORT, *_ROOT, *_MEGATRON)),
    Family("gpt", (*_WRAPPERS, *_PORT, *_ROOT, *_MEGATRON, *_GPT)),
    Family("meta", (*_WRAPPERS, *_PORT, *_ROOT, *_MEGATRON, *_GPT, *_META)),
)
"""The passes of name matching, from the strictest to the most lenient."""


def canonical_name(site: str) -> str:
    """Return the site in the common spelling, after the rewrites of all families."""
    return FAMILIES[-1].common(site)


def is_partial(site: str) -> bool:
    """Return whether the site records partial sums before an all-reduce."""
    return PARTIAL in site and site.rpartition(":")[0].endswith(PARTIAL)


def all_reduced_site(site: str) -> str:
    """Return the site that records the total of the partial sums at ``site``."""
    path, _, port = site.rpartition(":")
    return f"{path.removesuffix(PARTIAL)}:{port}"


def wrappers(site: str) -> str:
    """Return the part of a site's path that wrappers added, such as ``base_model.model.``; empty if there is none."""
    return "".join(f"{prefix.strip('.')}." for prefix in _WRAPPER.findall(site))


def unique_names(sites: Iterable[str], family: Family) -> dict[str, str]:
    """Return common spelling -> site, without spellings shared by unrelated sites. Of a module and its wrapper, keep
    the wrapper."""
    by_common: dict[str, list[str]] = {}
    for site in sites:
        by_common.setdefault(family.common(site), []).append(site)
    return {common: names[0] for common, names in by_common.items() if len(names) == 1 or _is_one(names)}


def _is_one(names: list[str]) -> bool:
    """Return whether the names belong to one module and its wrappers; sorts ``names`` so that the outermost comes
    first."""
    names.sort(key=len)
    return len({_WRAPPER.sub("", name) for name in names}) == 1
