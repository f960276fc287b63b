"""ModelConfig: the checked config.json of a Hugging Face checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from tapscope.core.errors import CheckpointError, UsageError
from tapscope.engine.hf_config.config_reader import ConfigReader
from tapscope.engine.hf_config.dense_families import DENSE
from tapscope.engine.hf_config.family import (
    CHUNKED,
    EXPERTS,
    FULL,
    HYBRID,
    LINEAR,
    MLP,
    SLIDING,
    Family,
    shared_fields,
)
from tapscope.engine.hf_config.gemma3n_config import Gemma3nConfig, LayerInputsConfig
from tapscope.engine.hf_config.gemma4_config import GEMMA4
from tapscope.engine.hf_config.linear_config import LinearAttentionConfig
from tapscope.engine.hf_config.mamba_config import Mamba1Config, MambaConfig
from tapscope.engine.hf_config.mla_config import IndexerConfig, MlaConfig
from tapscope.engine.hf_config.moe_config import MoeConfig
from tapscope.engine.hf_config.moe_families import SPARSE
from tapscope.engine.hf_config.rope_config import Rope
from tapscope.engine.hf_config.zamba2_config import SharedBlocks

FAMILIES: dict[str, Family] = DENSE | SPARSE | GEMMA4
"""Supported architectures, by their name in ``architectures`` of config.json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shapes and constants of one model; all counts are of the whole model, not of a rank."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    full_kv_heads: int | None = None
    full_head_dim: int | None = None
    """Key/value heads and head size of layers with full attention, where they are others (Gemma 4)."""
    keys_as_values: bool = False
    """Whether values of layers with full attention are their keys before norm and rotation (Gemma 4)."""
    rms_norm_eps: float
    max_positions: int
    """Maximum positions of a request: ``max_position_embeddings``, extended by :meth:`Rope.reach`."""
    rope: Rope
    local_rope: Rope | None = None
    """Rotary embedding of the sliding layers if it differs (Gemma 3)."""
    layer_types: tuple[str, ...]
    """``full_attention``, ``sliding_attention``, ``chunked_attention``, ``linear_attention``, ``hybrid`` (attention and
    a recurrent state), ``mlp`` or ``moe`` (layers that do not mix tokens) for each layer."""
    sliding_window: int | None = None
    """Window of the sliding layers in positions, a row's own included."""
    chunk_size: int | None = None
    """Positions of a chunk in layers of ``chunked_attention`` (Llama 4)."""
    temperature_floor: int | None = None
    temperature_scale: float = 0.0
    temperature_offset: int = 0
    """Queries are multiplied by 1 + scale * ln(1 + floor((position + offset) / floor)), arXiv:2501.19399: in layers
    without rotary embedding if there are any, else in all (Llama 4, Ministral 3); floor None: not at all."""
    activation: str = "silu"
    attention_scale: float
    """Factor of the attention scores."""
    attention_softcap: float | None = None
    """Scores become softcap * tanh(scores / softcap) (Gemma 2)."""
    final_softcap: float | None = None
    """The same for logits."""
    embedding_scale: float | None = None
    """Factor of token embeddings, applied in the embedding module (Gemma)."""
    embedding_multiplier: float = 1.0
    """Factor of token embeddings, applied to the module's output (Granite)."""
    residual_multiplier: float = 1.0
    """Factor of the outputs of attention and MLP before they are added to the residual (Granite)."""
    logits_divisor: float = 1.0
    """Divisor of the logits (``logits_scaling`` of Granite)."""
    residual_in_fp32: bool = False
    """Whether hidden states between layers are in float32 (Mamba-2)."""
    no_rope_layers: frozenset[int] = frozenset()
    """Layers without rotary embedding (SmolLM3)."""
    qk_norm: bool = False
    """Whether queries and keys are normalised per head."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    moe: MoeConfig | None = None
    """Experts; None in dense models."""
    linear: LinearAttentionConfig | None = None
    """Layers of linear attention; None in models without."""
    short_conv: int | None = None
    """Positions that the convolution of layers without attention sees, a row's own included (LFM2)."""
    short_conv_bias: bool = False
    mamba: MambaConfig | None = None
    """Mamba-2 layers; None in models without."""
    shared_blocks: SharedBlocks | None = None
    """Attention blocks that several layers share (Zamba2)."""
    mamba1: Mamba1Config | None = None
    """Mamba layers with a selective scan; None in models without."""
    key_multiplier: float = 1.0
    attention_in_multiplier: float = 1.0
    attention_out_multiplier: float = 1.0
    mlp_multipliers: tuple[float, float] = (1.0, 1.0)
    """Factors of keys, of the attention's input and output, and of the MLP's gate and output (Falcon-H1)."""
    gemma3n: Gemma3nConfig | None = None
    """Alternating updates (Gemma 3n)."""
    layer_inputs: LayerInputsConfig | None = None
    """Embeddings that each layer reads (Gemma 3n, Gemma 4); None in models without."""
    shared_kv_layers: Mapping[int, int] = field(default_factory=dict)
    """Layers that cache no keys and values -> the layer whose they read (Gemma 3n, Gemma 4)."""
    wide_shared_mlp: bool = False
    """Whether the MLPs of these layers have twice the features (Gemma 4)."""
    mla: MlaConfig | None = None
    """Multi-head latent attention, with ``head_dim`` for the rotated part of a head; None for other attention."""
    index: IndexerConfig | None = None
    """Indexer of sparse attention (DeepSeek-V3.2); None: rows attend to all earlier positions."""
    num_skipped_layers: int = 0
    """Layers after the last one in the checkpoint that are not computed (DeepSeek-V3's MTP layers)."""
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    dtype: str | None
    """dtype of the weights, as config.json names it."""

    def of_layer(self, layer: int) -> "ModelConfig":
        """This config with the key/value heads and head size of ``layer``."""
        if self.layer_types[layer] != FULL or self.full_head_dim is None or self.full_kv_heads is None:
            return self
        return replace(self, num_kv_heads=self.full_kv_heads, head_dim=self.full_head_dim)

    def window(self, layer: int) -> int | None:
        """Positions that ``layer`` looks back at most, a row's own included; None for full attention."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else self.chunk(layer)

    def chunk(self, layer: int) -> int | None:
        """Size of the chunks of positions that ``layer`` attends within; None if there is one only."""
        size = self.chunk_size if self.layer_types[layer] == CHUNKED else None
        return size if size is not None and size < self.max_positions else None

    @property
    def linear_layers(self) -> tuple[int, ...]:
        """Layers that have a recurrent state."""
        return tuple(layer for layer, kind in enumerate(self.layer_types) if kind in (LINEAR, HYBRID))

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Layers that cache keys and values."""
        without = {LINEAR, MLP, EXPERTS}
        kinds = enumerate(self.layer_types)
        return tuple(layer for layer, kind in kinds if kind not in without and layer not in self.shared_kv_layers)

    @property
    def is_prefix_shareable(self) -> bool:
        """Whether equal prefixes have equal keys; not with rope that depends on the request's length."""
        return not any(rope is not None and rope.depends_on_length for rope in (self.rope, self.local_rope))

    def facts(self) -> dict[str, int | float]:
        """The sizes that determine tensor layouts, under their names in config.json."""
        parts = [
            part.facts() for part in (self.moe, self.mla, self.linear, self.mamba, self.mamba1) if part is not None
        ]
        full = {"num_global_key_value_heads": self.full_kv_heads, "global_head_dim": self.full_head_dim}
        parts.append({name: value for name, value in full.items() if value is not None})
        return {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "rms_norm_eps": self.rms_norm_eps,
        } | {name: value for part in parts for name, value in part.items()}

    def check_split(self, tp: int) -> None:
        """Raise UsageError if there are more ranks than heads; no size needs to be divisible."""
        if tp > self.num_heads:
            raise UsageError(f"tp={tp} is more than the model's {self.num_heads} heads; use at most {self.num_heads}")
        if self.linear is not None and tp > self.linear.num_key_heads:
            most = self.linear.num_key_heads
            raise UsageError(f"tp={tp} is more than the {most} key heads of linear attention; use at most {most}")
        if self.mamba is not None and tp > self.mamba.num_heads:
            most = self.mamba.num_heads
            raise UsageError(f"tp={tp} is more than the {most} heads of the Mamba layers; use at most {most}")

    @classmethod
    def read(cls, folder: Path, architecture: str | None = None) -> "ModelConfig":
        """Read ``folder/config.json`` (and end tokens from generation_config.json); raises CheckpointError.

        Unsupported settings that would change results are errors that name the key and its value. ``architecture``: of
        FAMILIES, instead of the one in config.json.
        """
        if not folder.is_dir():
            is_hub_id = len(folder.parts) == 2 and not folder.is_absolute() and not folder.parent.exists()
            hint = f"; to download it: hf download {folder} --local-dir DIR" if is_hub_id else ""
            raise CheckpointError(
                f"no model directory at {folder}; give a folder with config.json and *.safetensors{hint}"
            )
        reader = ConfigReader.open(folder / "config.json")
        architecture = architecture or _architecture(reader)
        family = FAMILIES[architecture]
        text = _text_reader(reader, family) if family.is_multimodal else reader
        text = text if family.prepare is None else family.prepare(text)
        shared = shared_fields(text, family)
        fields = shared | family.read(text, shared)
        return cls(architecture=architecture, eos_token_ids=_eos(reader, folder), dtype=_dtype(reader, text), **fields)


def _text_reader(reader: ConfigReader, family: Family) -> ConfigReader:
    """``text_config`` of a multimodal model, with the family's defaults."""
    section = reader.section("text_config")
    if section is None:
        raise reader.fail("text_config", "expected a JSON object with the decoder's settings")
    tied = {name: reader.values[name] for name in ("tie_word_embeddings",) if reader.get(name) is not None}
    given = {name: value for name, value in section.values.items() if value is not None}
    return ConfigReader(reader.path, {**family.text_defaults, **given, **tied})


def _architecture(reader: ConfigReader) -> str:
    """The first of ``architectures``, or by ``model_type`` where there is none."""
    named = reader.get("architectures") or []
    by_type = {family.model_type: name for name, family in FAMILIES.items()}
    model_type = str(reader.get("model_type"))
    if not named and model_type in by_type:
        return by_type[model_type]
    name = named[0] if isinstance(named, list) and named else model_type
    if not isinstance(name, str) or name not in FAMILIES:
        raise CheckpointError(
            f"{reader.path}: architecture {name!r} is not supported; supported: {', '.join(FAMILIES)}"
        )
    return name


def _dtype(*readers: ConfigReader) -> str | None:
    """``dtype``, formerly ``torch_dtype``, of the first reader that has it; None: not given."""
    for reader in readers:
        for name in ("dtype", "torch_dtype"):
            value = reader.get(name)
            if value is not None and not isinstance(value, str):
                raise reader.fail(name, 'expected the name of a dtype, such as "bfloat16"')
            if value:
                return str(value)
    return None


def _eos(reader: ConfigReader, folder: Path) -> tuple[int, ...]:
    """End tokens; generation_config.json, where there is one, overrides config.json as in transformers."""
    path = folder / "generation_config.json"
    value = ConfigReader.open(path).get("eos_token_id") if path.exists() else None
    value = reader.get("eos_token_id") if value is None else value
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(type(token) is not int for token in ids):
        raise CheckpointError(f"{reader.path}: eos_token_id is {value!r}; it must be a token id or a list of them")
    return tuple(ids)
