"""Megatron-core: process groups, dims of modules, and token rows of packed sequences."""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from msgspec import structs

from tapscope.core.framework_plugin import FrameworkPlugin, ModuleFacts, ProcessLayout, StepRows
from tapscope.core.observe import StepInfo
from tapscope.core.token_rows import Arguments, RowReader
from tapscope.frameworks.parallel_state import layout_of

_STATE = "megatron.core.parallel_state"
_HEADS = "s b a[tp] d"
_BLOCK = {"in[hidden_states]": "SEQ", "in[attention_mask]": "1 1 q k", "in[rotary_pos_emb]": "s 1 1 d"}

DIMS: dict[str, dict[str, str]] = {
    "": {"in[input_ids]": "b s", "in[position_ids]": "b s", "in[attention_mask]": "1 1 q k"},
    "embedding": {"in[input_ids]": "b s", "in[position_ids]": "b s", "out": "SEQ"},
    "word_embeddings": {"in[input_]": "b s", "out": "EMB", "param[weight]": "v[tp] h"},
    "embedding_dropout": {"in[input]": "SEQ", "out": "SEQ"},
    "rotary_pos_emb": {"out": "s 1 1 d"},
    "decoder": _BLOCK | {"out": "SEQ"},
    "layer": _BLOCK | {"out[0]": "SEQ"},
    "norm": {"in[input]": "SEQ", "in[x]": "SEQ", "out": "SEQ", "param[weight]": "h", "param[weight].grad": "NORM"},
    "self_attention": _BLOCK | {"out[0]": "SEQ"},
    "linear_qkv": {
        "in[input_]": "SEQ",
        "out[0]": "s b qkv[tp]",
        "param[weight]": "qkv[tp] h",
        "param[bias]": "qkv[tp]",
    },
    "q_layernorm": {
        "in[x]": _HEADS,
        "in[input]": _HEADS,
        "out": _HEADS,
        "param[weight]": "d",
        "param[weight].grad": "d[tp:partial]",
    },
    "core_attention": {
        **{f"in[{name}]": _HEADS for name in ("query", "key", "value")},
        "in[attention_mask]": "1 1 q k",
        "out": "s b h[tp]",
    },
    "scale_mask_softmax": {"in[input]": "b a[tp] s k", "in[mask]": "1 1 q k", "out": "b a[tp] s k"},
    "attention_dropout": {"in[input]": "b a[tp] s k", "out": "b a[tp] s k"},
    "linear_proj": {"in[input_]": "s b h[tp]", "out[0]": "SEQ", "param[weight]": "o h[tp]"},
    "mlp": {"in[hidden_states]": "SEQ", "out[0]": "SEQ"},
    "router": {
        "in[input]": "SEQ",
        "tap[logits]": "SCORES",
        "out[0]": "TOKENS e",
        "out[1]": "TOKENS e",
        "param[weight]": "e h",
    },
    "linear_fc1": {
        "in[input_]": "SEQ",
        "out[0]": "s b FC1[tp]",
        "param[weight]": "FC1[tp] h",
        "param[bias]": "FC1[tp]",
    },
    "linear_fc2": {"in[input_]": "s b f[tp]", "out[0]": "SEQ", "param[weight]": "o f[tp]"},
    "output_layer": {"in[input_]": "SEQ", "out[0]": "LOGITS", "param[weight]": "v[tp] h"},
}
"""Last component of a module path -> port -> dims. Words in capitals are placeholders that depend on the
configuration."""

_SAME_DIMS = {"k_layernorm": "q_layernorm"} | dict.fromkeys(
    ("input_layernorm", "pre_mlp_layernorm", "final_layernorm", "pre_cross_attn_layernorm", "cross_attention"), "norm"
)
_PLACEHOLDER = re.compile(r"[A-Z][A-Z0-9]+")


class MegatronPlugin(FrameworkPlugin):
    """Plugin for megatron.core models: tensor and sequence parallelism, packed sequences (THD)."""

    name = "megatron"
    oldest = "0.12"

    def layout(self) -> ProcessLayout | None:
        """Return sizes and ranks of the groups in ``megatron.core.parallel_state``."""
        return layout_of(_STATE)

    def module_facts(self, path: str, module: Any, parent: Any) -> ModuleFacts:
        """Return dims by module name; dims of experts are left to the comparator, which knows their rows."""
        if ".experts." in path or ".local_experts." in path:
            return ModuleFacts()
        last = path.rpartition(".")[2]
        dims = DIMS.get("layer" if last.isdecimal() else _SAME_DIMS.get(last, last), {})
        substitutions = _placeholders(module, parent)
        expanded = {port: _expanded(text, substitutions) for port, text in dims.items()}
        # A router returns weights and flags of the chosen experts only; detecting a near tie needs the logits of all
        # experts.
        methods = {"gating": "logits"} if last == "router" and callable(getattr(module, "gating", None)) else {}
        return replace(super().module_facts(path, module, parent), dims=expanded, methods=methods)

    def module_number(self, module: Any) -> int | None:
        """Return the global index of a layer, from its 1-based ``layer_number``."""
        number = getattr(module, "layer_number", None)
        return number - 1 if isinstance(number, int) and number > 0 else None

    def microbatch(self, model: Any) -> int | None:
        """Return the microbatch number that Megatron's schedules store in the decoder layers."""
        while hasattr(model, "module"):
            model = model.module
        layers = getattr(getattr(model, "decoder", None), "layers", ())
        number = getattr(next(iter(layers), None), "current_microbatch", None)
        return number if isinstance(number, int) and number >= 0 else None

    def step_rows(
        self, model: Any, info: StepInfo, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> StepRows | None:
        """Return the rows of packed sequences, including the context-parallel layout with two chunks of every sequence
        per rank.

        None for padded batches, whose rows are inferred from the arguments.
        """
        packed = kwargs.get("packed_seq_params")
        bounds, padded = (getattr(packed, name, None) for name in ("cu_seqlens_q", "cu_seqlens_q_padded"))
        ids = kwargs.get("input_ids", args[0] if args else None)
        if not (hasattr(bounds, "is_cuda") and hasattr(ids, "is_cuda")):  # tensors
            return None
        layout = self.layout()
        shard = (0, 1) if layout is None else (layout.coords.get("cp", 0), layout.mesh.get("cp", 1))
        tensors = {"ids": ids, "bounds": bounds} | ({} if padded is None else {"padded": padded})
        outline = structs.replace(info, grid=tuple(ids.shape))
        return StepRows(info=outline, tensors=tensors, complete=partial(_packed_rows, shard=shard))


def _packed_rows(outline: StepInfo, values: Mapping[str, Any], *, shard: tuple[int, int]) -> StepInfo:
    """Return the step with the rows delimited by ``values["bounds"]``; without rows if the bounds do not fit the token
    ids.

    ``values["padded"]``, if present, are the bounds including the padding after each sequence.
    """
    ids, bounds = (np.asarray(values[name], np.int64) for name in ("ids", "bounds"))
    lengths, padded = np.diff(bounds.reshape(-1)), np.diff(np.reshape(values.get("padded", bounds), -1))
    padded = padded if padded.shape == lengths.shape else lengths
    step = RowReader().read(
        outline.step, outline.phase, Arguments(ids=ids, lengths=padded, real_lengths=lengths), shard
    )  # in training, no sequence continues in a later step
    if step is None:
        return structs.replace(outline, grid=())
    return structs.replace(outline, grid=step.grid, rows=step.rows, token_ids=step.token_ids)


def _placeholders(module: Any, parent: Any) -> dict[str, str]:
    """Return the replacement for each placeholder in :data:`DIMS`."""
    configs = [getattr(each, "config", None) for each in (module, parent)]
    config = next((each for each in configs if hasattr(each, "sequence_parallel")), None)
    is_sequence_parallel = bool(getattr(config, "sequence_parallel", False))
    return {
        "SEQ": "s[tp] b h" if is_sequence_parallel else "s b h",
        "EMB": "s[tp] b h" if is_sequence_parallel and getattr(module, "reduce_scatter_embeddings", False) else "b s h",
        "SCORES": "s[tp] b e" if is_sequence_parallel else "s b e",
        "NORM": "h[tp:partial]" if is_sequence_parallel else "h",
        "TOKENS": "(s*b)[tp]" if is_sequence_parallel else "(s*b)",
        "FC1": "(gate+up)" if getattr(config, "gated_linear_unit", False) else "f",
        "LOGITS": "s b v" if getattr(module, "gather_output", True) else "s b v[tp]",
    }


def _expanded(text: str, substitutions: Mapping[str, str]) -> str:
    full = _PLACEHOLDER.sub(lambda match: substitutions[match[0]], text)
    return full if "tp" in full else f"{full} # tp:replicated"
