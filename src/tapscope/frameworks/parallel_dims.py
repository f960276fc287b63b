"""Dims of tensor-parallel layers in vLLM and SGLang, whose layer classes share an origin."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

WHOLE = "t h # tp:replicated"
SHARD = "t h[tp]"
SUMMAND = "t h[tp:partial]"


def without_adapter(module: Any) -> Any:
    """Return the base layer of a LoRA wrapper, which is only partially called; any other module is returned
    unchanged."""
    is_wrapper = any(each.__name__ == "BaseLayerWithLoRA" for each in type(module).__mro__)
    return getattr(module, "base_layer", module) if is_wrapper else module


def layer_dims(module: Any, parent: Any, default_tp: Callable[[], int]) -> Mapping[str, str]:
    """Return port -> dims of one module; ``default_tp`` returns the group size if the layer does not store it."""
    module = without_adapter(module)
    kinds = {each.__name__ for each in type(module).__mro__}
    tp = _tp(module, default_tp)
    if tp == 1 and kinds & {"LinearBase", "VocabParallelEmbedding"}:
        return {}
    if "ColumnParallelLinear" in kinds:
        return _column(module, kinds)
    if "RowParallelLinear" in kinds:
        return _row(module)
    if "VocabParallelEmbedding" in kinds:
        return _embedding(module)
    if kinds & {"FusedMoE", "RoutedExperts", "MoERunner"}:
        return _experts(module)
    if "LogitsProcessor" in kinds:
        return {"out": "t v # tp:replicated"} if default_tp() > 1 else {}
    if parent is None:
        return {}
    if (attention := _sibling(parent, "QKVParallelLinear", default_tp)) is not None:
        return _in_attention(module, parent, attention)
    if any("AndMul" in kind for kind in kinds) and _sibling(parent, "ColumnParallelLinear", default_tp) is not None:
        return {f"in[{name}]": "t (gate+up)[tp]" for name in ("x", "input", "input_")} | {"out": SHARD}
    return {}


def _tp(module: Any, default_tp: Callable[[], int]) -> int:
    size = getattr(module, "tp_size", None)
    return size if isinstance(size, int) else default_tp()


def _column(module: Any, kinds: set[str]) -> dict[str, str]:
    features = "h[tp]"
    sizes = getattr(module, "output_sizes", None)
    copies = getattr(module, "num_kv_head_replicas", 1)
    if "QKVParallelLinear" in kinds:
        features = _sections("qkv", _qkv_sizes(module), (1, copies, copies)) if _qkv_sizes(module) else features
    elif sizes:
        names = ("gate", "up") if len(sizes) == 2 else [f"part{i}" for i in range(len(sizes))]
        features = _sections(names, sizes)
    out = WHOLE if getattr(module, "gather_output", False) else f"t {features}"
    return {"out": out, "out[0]": out, "param[weight]": f"{features} d", "param[bias]": features}


def _qkv_sizes(module: Any) -> tuple[int, ...]:
    """Return the total features of q, k and v over all ranks; the layer's ``output_sizes`` counts replicated KV heads
    repeatedly."""
    heads, kv, size = (getattr(module, name, None) for name in ("total_num_heads", "total_num_kv_heads", "head_size"))
    if not (heads and kv and size):
        return ()
    return heads * size, kv * size, kv * (getattr(module, "v_head_size", None) or size)


def _sections(names: Sequence[str], sizes: Sequence[int], copies: Sequence[int] = ()) -> str:
    if len(names) != len(sizes):
        return "h[tp]"
    many = [f"x{each}" if each > 1 else "" for each in copies or (1,) * len(sizes)]
    return f"({'+'.join(f'{n}={s}{c}' for n, s, c in zip(names, sizes, many, strict=True))})[tp]"


def _row(module: Any) -> dict[str, str]:
    out = WHOLE if getattr(module, "reduce_results", True) else SUMMAND
    given = SHARD if getattr(module, "input_is_parallel", True) else WHOLE
    inputs = {f"in[{name}]": given for name in ("input_", "input", "x")}
    return inputs | {"out": out, "out[0]": out, "param[weight]": "o h[tp]", "param[bias]": "o # tp:replicated"}


def _embedding(module: Any) -> dict[str, str]:
    rows = getattr(module, "org_vocab_size", None) or getattr(module, "num_embeddings", None)
    shard = f"v={rows}[tp]" if rows else "v[tp]"
    return {"out": WHOLE, "param[weight]": f"{shard} h", "param[bias]": shard}


def _experts(module: Any) -> dict[str, str]:
    """Return dims of stacked experts; under expert parallelism each rank holds a subset of whole experts."""
    if getattr(module, "use_ep", False) or (getattr(module, "ep_size", None) or 1) > 1:
        return {"param[w13_weight]": "e[ep] (gate+up) h", "param[w2_weight]": "e[ep] h i"}
    if (getattr(module, "tp_size", None) or 1) == 1:
        return {}
    return {"param[w13_weight]": "e (gate+up)[tp] h", "param[w2_weight]": "e h i[tp]"}


def _sibling(parent: Any, kind: str, default_tp: Callable[[], int]) -> Any:
    """Return a tensor-parallel layer of class ``kind`` among the children of ``parent``, or None."""
    for child in map(without_adapter, parent.children()):
        if any(each.__name__ == kind for each in type(child).__mro__) and _tp(child, default_tp) > 1:
            return None if getattr(child, "gather_output", False) else child
    return None


def _in_attention(module: Any, parent: Any, qkv: Any) -> dict[str, str]:
    """Return dims of modules between qkv_proj and o_proj: rotary embedding, per-head norms and the attention."""
    heads, kv, size = (getattr(qkv, name, None) for name in ("total_num_heads", "total_num_kv_heads", "head_size"))
    copies = getattr(qkv, "num_kv_head_replicas", 1)
    many = f"={kv * size}x{copies}" if copies > 1 and kv and size else ""
    queries, keys = SHARD, f"t h{many}[tp]"
    names = {name for name, child in parent.named_children() if child is module}
    if names & {"q_norm", "q_layernorm"}:
        return dict.fromkeys(("in[x]", "out"), "t n[tp] d")
    if names & {"k_norm", "k_layernorm"}:
        copied = f"={kv}x{copies}" if copies > 1 and kv else ""
        return dict.fromkeys(("in[x]", "out"), f"t n{copied}[tp] d")
    if any("Rotary" in each.__name__ for each in type(module).__mro__):
        return {"in[query]": queries, "in[key]": keys, "out[0]": queries, "out[1]": keys}
    if any("Attention" in each.__name__ for each in type(module).__mro__) and heads:
        inputs = {"in[query]": queries, "in[q]": queries}
        return inputs | dict.fromkeys(("in[key]", "in[k]", "in[value]", "in[v]"), keys) | {"out": queries}
    return {}


def named_forward(module: Any) -> Callable[..., Any] | None:
    """Return ``forward_native`` of a custom op, whose ``forward`` only forwards ``*args``; None for other modules."""
    kinds = {each.__name__ for each in type(module).__mro__}
    native = getattr(module, "forward_native", None)
    return native if kinds & {"CustomOp", "MultiPlatformOp"} and callable(native) else None
