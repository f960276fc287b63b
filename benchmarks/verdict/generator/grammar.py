"""Grammar: draws a random bug (operation, tensor, part, rank, step) that is possible for a model and a framework."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.verdict.generator.bug import Bug
from benchmarks.verdict.generator.damage import Damage
from benchmarks.verdict.generator.pairing import Pairing

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of a checkpoint's tensors, by key."""


@dataclass(frozen=True, slots=True)
class BugContext:
    """The pairing, tensors and config for which a bug is drawn."""

    pairing: Pairing
    shapes: Shapes
    config: Any
    """The transformers config."""

    @property
    def framework(self) -> str:
        """Framework of the target."""
        return self.pairing.target.framework

    @property
    def tp(self) -> int:
        """Tensor-parallel ranks of the target."""
        return self.pairing.target.tp

    @property
    def layers(self) -> int:
        """Number of layers."""
        return int(self.config.num_hidden_layers)

    @property
    def is_llama_like(self) -> bool:
        """Whether modules are named as in Llama."""
        return "model.layers.0.mlp.down_proj.weight" in self.shapes or self.is_moe

    @property
    def is_moe(self) -> bool:
        """Whether the model has experts."""
        return any(".experts." in key for key in self.shapes)

    @property
    def is_latent(self) -> bool:
        """Whether attention is multi-head latent attention (DeepSeek)."""
        return any("kv_b_proj" in key for key in self.shapes)

    @property
    def num_heads(self) -> int:
        """Number of query heads."""
        return int(self.config.num_attention_heads)


def draw_bug(seed: int, number: int, context: BugContext) -> Bug:
    """Draw the bug of a case; deterministic for a seed, number and model."""
    draw = random.Random(f"bug {seed} {number}")
    kinds = _kinds(context)
    kind = draw.choices(list(kinds), list(kinds.values()))[0]
    bug = _DRAWN[kind](draw, context)
    adds_one = str(context.config.model_type).startswith("gemma") and "norm" in bug.module
    return replace(bug, adds_one=adds_one)


def _kinds(context: BugContext) -> dict[str, float]:
    """Return the sampling weight of each kind of bug that is possible for this model and framework."""
    kinds = {"weight": 8.0}
    if not context.is_llama_like:
        return kinds
    kinds |= {"output": 5.0, "epsilon": 1.0, "residual": 0.7}
    if context.framework == "megatron":
        return kinds | ({"rank_weight": 2.0} if context.tp > 1 else {})
    if context.config.model_type not in ("gemma3_text", "deepseek_v3"):
        kinds |= {"positions": 0.7, "frequencies": 1.2}
    if not context.is_moe and context.config.model_type != "phi3":
        kinds["activation"] = 1.0
    if context.is_moe:
        kinds["router"] = 2.5
    if not context.is_latent:
        kinds |= {"keys": 1.5, "values": 1.5}
        kinds["softmax_scale"] = 0.8
    if context.framework == "transformers" and context.pairing.target.attention == "eager":
        kinds["mask"] = 1.5
    if context.framework == "engine" and context.tp > 1:
        kinds |= {"rank_weight": 2.0} | ({} if context.is_moe else {"partial": 2.0})
    return kinds


def _weight(draw: random.Random, context: BugContext) -> Bug:
    key = draw.choice(sorted(key for key in context.shapes if not key.endswith("wpe.weight")))
    shape = context.shapes[key]
    damage = _damage(draw, context, shape, key)
    return Bug(kind="weight", module=key, expect=_owners(key, context), damage=damage, shape=tuple(shape))


def _owners(key: str, context: BugContext) -> tuple[str, ...]:
    """Return the module names of a checkpoint tensor, in transformers and in the target's framework."""
    path = key.rpartition(".")[0]
    if ".experts." in key:
        layer = path.partition(".experts.")[0].replace("block_sparse_moe", "mlp")
        return (f"{layer}.experts",)
    path = path.replace("block_sparse_moe", "mlp")
    names = [path]
    if context.framework == "megatron":
        names += [megatron_name(path)]
    return tuple(names)


def megatron_name(path: str) -> str:
    """Convert a transformers path: ``model.layers.1.mlp.down_proj`` is ``decoder.layers.1.mlp.linear_fc2`` in
    Megatron."""
    head, _, last = path.rpartition(".")
    names = {"q_proj": "linear_qkv", "k_proj": "linear_qkv", "v_proj": "linear_qkv", "o_proj": "linear_proj"}
    names |= {"gate_proj": "linear_fc1", "up_proj": "linear_fc1", "down_proj": "linear_fc2"}
    names |= {"post_attention_layernorm": "pre_mlp_layernorm", "norm": "final_layernorm"}
    names |= {"q_norm": "q_layernorm", "k_norm": "k_layernorm", "self_attn": "self_attention"}
    if path in ("model.embed_tokens", "lm_head"):
        return {"model.embed_tokens": "embedding.word_embeddings", "lm_head": "output_layer"}[path]
    head = head.replace("model", "decoder", 1).replace("self_attn", "self_attention")
    return f"{head}.{names.get(last, last)}"


def _damage(draw: random.Random, context: BugContext, shape: Sequence[int], key: str = "") -> Damage:
    """Draw an operation on all or part of a tensor."""
    axis = draw.choice((-1, -2)) if len(shape) > 1 else -1
    size = shape[axis]
    part = _part(draw, context, size, key)
    op = draw.choices(
        ("scale", "zero", "negate", "add", "swap", "roll", "copy", "round", "clip"), (6, 3, 2, 1.5, 2, 1, 1.5, 2, 0.7)
    )[0]
    if op in ("swap", "copy"):
        count = part.get("count", max(1, size // 8))
        start = part.get("start", 0)
        other = (start + count * draw.randint(1, max(1, size // count - 1))) % size
        return Damage(op=op, axis=axis, start=start, count=count, other=other)
    if op == "roll":
        return Damage(op=op, axis=axis, start=part.get("start", 0), count=part.get("count", size))
    if op == "round":
        narrow = {"bfloat16": "float8_e4m3", "float16": "bfloat16"}
        name = narrow.get(context.pairing.target.dtype, draw.choice(("bfloat16", "float16", "float8_e4m3")))
        return Damage(op=op, axis=axis, dtype=name, **part)
    amount = 0.0
    if op == "scale":
        amount = draw.choice((0.5, 2.0, 4.0, 1.0 + _small(draw), 1.0 + _small(draw), 1.0 - _small(draw)))
    elif op == "add":
        amount = draw.choice((1.0, _small(draw), -_small(draw)))
    elif op == "clip":
        amount = draw.choice((0.5, 1.0, 2.0, 3.0))
    return Damage(op=op, axis=axis, amount=amount, **part)


def _small(draw: random.Random) -> float:
    """Draw a number from 0.0005 to 0.5, log-uniform, with three digits."""
    return float(f"{0.5 * 10 ** draw.uniform(-3.0, 0.0):.3g}")


def _part(draw: random.Random, context: BugContext, size: int, key: str) -> dict[str, int]:
    """Draw a part, as fields of a Damage: all, one index, a head or another block, or every n-th index."""
    heads = context.num_heads if size % context.num_heads == 0 and any(n in key for n in ("q_proj", "o_proj")) else 0
    kinds = ["all", "one", "block", "some"] + (["head", "head"] if heads else [])
    kind = draw.choice(kinds)
    if kind == "all":
        return {}
    if kind == "one" or size < 8:
        return {"start": draw.randrange(size)}
    if kind == "head":
        return {"start": size // heads * draw.randrange(heads), "count": size // heads}
    if kind == "block":
        count = max(2, size // draw.choice((2, 4, 8)))
        return {"start": count * draw.randrange(size // count), "count": count}
    stride = draw.choice((2, 3, 4))
    return {"start": draw.randrange(stride), "count": max(2, size // stride // 2), "stride": stride}


def _output(draw: random.Random, context: BugContext) -> Bug:
    module = draw.choice(_modules(draw, context))
    width = int(context.config.hidden_size)
    damage = _damage(draw, context, (width,))
    wraps = context.framework == "megatron"
    place: dict[str, Any] = {}
    if draw.random() < 0.35:
        place["rows"] = draw.choice(("first", "last"))
    if draw.random() < 0.35 and context.pairing.target.schedule != "whole" and not wraps:
        place["first_call"] = draw.choice((1, 2))
    if context.tp > 1 and draw.random() < 0.5:
        place["rank"] = draw.randrange(context.tp)
    if wraps and context.pairing.target.workload == "one":
        place.pop("rows", None)  # Megatron's second axis is the request, of which there is one
    shape, shards = _output_shape(module, context)
    expect = _both(module, context)
    return Bug(kind="output", module=module, expect=expect, damage=damage, shape=shape, shards=shards, **place)


def _output_shape(module: str, context: BugContext) -> tuple[tuple[int], int]:
    """Return (width of a module's output on one rank, number of ranks across which it is sharded)."""
    parent, _, name = module.rpartition(".")
    config, tp = context.config, context.tp
    weight = context.shapes.get(f"{parent}.up_proj.weight" if name == "act_fn" else f"{module}.weight", ())
    width = weight[0] if len(weight) == 2 and name != "embed_tokens" else int(config.hidden_size)
    if name == "lm_head":
        width = context.shapes["model.embed_tokens.weight"][0]
    is_split = name in ("q_proj", "gate_proj", "up_proj", "act_fn")  # logits are gathered
    is_split |= name in ("k_proj", "v_proj") and int(config.num_key_value_heads) >= tp
    return ((width // tp,), tp) if is_split else ((width,), 1)


def _both(module: str, context: BugContext) -> tuple[str, ...]:
    return (module, megatron_name(module)) if context.framework == "megatron" else (module,)


def _modules(draw: random.Random, context: BugContext) -> list[str]:
    """Return the modules whose output may be damaged, in one random layer or outside the layers."""
    layer = f"model.layers.{draw.randrange(context.layers)}"
    parts = ["", ".self_attn", ".self_attn.o_proj", ".mlp", ".mlp.down_proj"]
    has_plain_norms = f"{layer}.input_layernorm.weight" in context.shapes
    parts += [".input_layernorm", ".post_attention_layernorm"] if has_plain_norms else [".post_attention_layernorm"]
    if context.framework != "megatron":
        parts += [] if context.is_latent else [".self_attn.q_proj", ".self_attn.k_proj", ".self_attn.v_proj"]
        parts += [] if context.config.model_type == "phi3" else [".mlp.gate_proj", ".mlp.up_proj", ".mlp.act_fn"]
    if context.config.model_type == "phi3":
        parts = [part for part in parts if part[-7:] not in (".q_proj", ".k_proj", ".v_proj")]
    if f"{layer}.mlp.down_proj.weight" not in context.shapes:  # experts
        parts = [part for part in parts if ".mlp." not in part] + [".mlp.experts"]
    ends = ["model.embed_tokens", "model.norm"] + ([] if context.framework == "engine" else ["lm_head"])
    return [layer + part for part in parts] + ends


def _layer(draw: random.Random, context: BugContext) -> str:
    return f"model.layers.{draw.randrange(context.layers)}"


def _epsilon(draw: random.Random, context: BugContext) -> Bug:
    norms = sorted(key.removesuffix(".weight") for key in context.shapes if key.endswith(("norm.weight",)))
    module = draw.choice(norms)
    value = draw.choice((1e-1, 1e-2, 1e-3, 1e-4, 0.0, _small(draw)))
    return Bug(kind="epsilon", module=module, expect=_both(module, context), value=value)


def _residual(draw: random.Random, context: BugContext) -> Bug:
    module = _layer(draw, context)
    return Bug(
        kind="residual",
        module=module,
        expect=_both(module, context),
        value=draw.choice((1.0, -1.0)),
        first_call=_late(draw, context),
    )


def _late(draw: random.Random, context: BugContext) -> int:
    stepped = context.framework != "megatron" and context.pairing.target.schedule != "whole"
    return draw.choice((0, 0, 0, 1)) if stepped else 0


def _positions(draw: random.Random, context: BugContext) -> Bug:
    text, value = draw.choice((("offset", 1.0), ("offset", -1.0), ("offset", 3.0), ("factor", 0.5), ("factor", 2.0)))
    module = "model.rotary_emb"
    late = _late(draw, context)
    return Bug(kind="positions", module=module, expect=(module,), text=text, value=value, first_call=late)


def _frequencies(draw: random.Random, context: BugContext) -> Bug:
    module = "model.rotary_emb"
    damage = _damage(draw, context, (8,))
    if damage.op == "clip":
        damage = Damage(op="scale", amount=1.01)
    head_dim = getattr(context.config, "head_dim", None) or context.config.hidden_size // context.num_heads
    return Bug(kind="frequencies", module=module, expect=(module,), damage=damage, shape=(int(head_dim) // 2,))


def _activation(draw: random.Random, context: BugContext) -> Bug:
    own = getattr(context.config, "hidden_activation", None) or context.config.hidden_act
    names = [n for n in ("silu", "gelu", "gelu_pytorch_tanh", "relu") if n != own]
    module = f"{_layer(draw, context)}.mlp.act_fn"
    return Bug(kind="activation", module=module, expect=(module,), text=draw.choice(names))


def _router(draw: random.Random, context: BugContext) -> Bug:
    dense = [i for i in range(context.layers) if f"model.layers.{i}.mlp.down_proj.weight" in context.shapes]
    layer = draw.choice([i for i in range(context.layers) if i not in dense])
    module = f"model.layers.{layer}.mlp.gate"
    top = int(context.config.num_experts_per_tok)
    ways = ["next_expert", "one_expert", "half", "equal"] + (["swapped", "last_dropped"] if top > 1 else [])
    text = draw.choice(ways)
    if context.is_latent:  # transformers' router returns only scores, the engine's also the chosen experts
        module = f"model.layers.{layer}.mlp.experts"
    late = _late(draw, context)
    return Bug(kind="router", module=module, expect=(module,), text=text, value=float(top), first_call=late)


def _cached(kind: str) -> Any:
    def drawn(draw: random.Random, context: BugContext) -> Bug:
        module = f"{_layer(draw, context)}.self_attn"
        head_dim = getattr(context.config, "head_dim", None) or context.config.hidden_size // context.num_heads
        damage = _damage(draw, context, (int(head_dim),))
        inner = f"{module}.attn" if context.framework == "engine" else module
        place = {"rows": draw.choice(("", "", "first", "last")), "first_call": _late(draw, context)}
        return Bug(kind=kind, module=inner, expect=(inner,), damage=damage, shape=(int(head_dim),), **place)

    return drawn


def _softmax_scale(draw: random.Random, context: BugContext) -> Bug:
    module = f"{_layer(draw, context)}.self_attn"
    module = f"{module}.attn" if context.framework == "engine" else module
    value = draw.choice((0.5, 2.0, 1.0 + _small(draw), 1.0 - _small(draw)))
    return Bug(kind="softmax_scale", module=module, expect=(module,), value=value)


def _mask(draw: random.Random, context: BugContext) -> Bug:
    module = f"{_layer(draw, context)}.self_attn"
    text = draw.choice(("hide_first", "hide_newest", "hide_third", "see_next", "see_all"))
    late = _late(draw, context)
    return Bug(kind="mask", module=module, expect=(module,), text=text, first_call=late)


def _partial(draw: random.Random, context: BugContext) -> Bug:
    module = _layer(draw, context) + draw.choice((".self_attn.o_proj", ".mlp.down_proj"))
    damage = _damage(draw, context, (int(context.config.hidden_size),))
    expect = (module, f"{module}.partial")
    place = {"rank": draw.randrange(context.tp), "first_call": _late(draw, context)}
    shape = (int(context.config.hidden_size),)
    return Bug(kind="partial", module=f"{module}.partial", expect=expect, damage=damage, shape=shape, **place)


def _rank_weight(draw: random.Random, context: BugContext) -> Bug:
    """Draw a bug in a weight shard of one rank."""
    parts = [".self_attn.o_proj", ".input_layernorm", ".post_attention_layernorm"]
    parts += [] if context.is_moe else [".mlp.down_proj"]
    layer = _layer(draw, context)
    parts = [part for part in parts if f"{layer}{part}.weight" in context.shapes]
    module = layer + draw.choice(parts)
    shape = context.shapes[f"{module}.weight"]
    shape = (*shape[:-1], shape[-1] // context.tp) if "proj" in module else shape
    damage = _damage(draw, context, shape)
    expect = (*_both(module, context), f"{module}.partial")
    rank = draw.randrange(context.tp)
    return Bug(kind="rank_weight", module=module, expect=expect, damage=damage, rank=rank, shape=tuple(shape))


_DRAWN: Mapping[str, Any] = {
    "weight": _weight,
    "output": _output,
    "epsilon": _epsilon,
    "residual": _residual,
    "positions": _positions,
    "frequencies": _frequencies,
    "activation": _activation,
    "router": _router,
    "keys": _cached("keys"),
    "values": _cached("values"),
    "softmax_scale": _softmax_scale,
    "mask": _mask,
    "partial": _partial,
    "rank_weight": _rank_weight,
}
