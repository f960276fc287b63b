"""ModelConfig: the parsed and validated config.json of a Hugging Face checkpoint."""

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
"""Supported architectures: name in ``architectures`` of config.json -> family."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shapes and constants of one model; all counts refer to the whole model, not to one rank."""

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
    """Number of key/value heads and head size of full-attention layers, if they differ (Gemma 4)."""
    keys_as_values: bool = False
    """Whether the values of full-attention layers are their keys before norm and rotation (Gemma 4)."""
    rms_norm_eps: float
    max_positions: int
    """Maximum number of positions of a request: ``max_position_embeddings``, extended by :meth:`Rope.reach`."""
    rope: Rope
    local_rope: Rope | None = None
    """Rotary embedding of the sliding-window layers, if it differs (Gemma 3)."""
    layer_types: tuple[str, ...]
    """``full_attention``, ``sliding_attention``, ``chunked_attention``, ``linear_attention``, ``hybrid`` (attention and
    a recurrent state), ``mlp`` or ``moe`` (layers that do not mix tokens) for each layer."""
    sliding_window: int | None = None
    """Window of the sliding-window layers in positions, including the current one."""
    chunk_size: int | None = None
    """Number of positions in a chunk of ``chunked_attention`` layers (Llama 4)."""
    temperature_floor: int | None = None
    temperature_scale: float = 0.0
    temperature_offset: int = 0
    """Attention temperature (arXiv:2501.19399; Llama 4, Ministral 3): queries are multiplied by
    1 + scale * ln(1 + floor((position + offset) / floor)), in the layers without rotary embedding if there are any,
    otherwise in all layers; no scaling if the floor is None."""
    activation: str = "silu"
    attention_scale: float
    """Factor of the attention scores."""
    attention_softcap: float | None = None
    """Soft cap of the attention scores: softcap * tanh(scores / softcap) (Gemma 2)."""
    final_softcap: float | None = None
    """Soft cap of the logits, with the same formula."""
    embedding_scale: float | None = None
    """Factor of token embeddings, applied in the embedding module (Gemma)."""
    embedding_multiplier: float = 1.0
    """Factor of token embeddings, applied to the module's output (Granite)."""
    residual_multiplier: float = 1.0
    """Factor of the outputs of attention and MLP before they are added to the residual (Granite)."""
    logits_divisor: float = 1.0
    """Divisor of the logits (``logits_scaling`` of Granite)."""
    residual_in_fp32: bool = False
    """Whether the residual stream between layers is in float32 (Mamba-2)."""
    no_rope_layers: frozenset[int] = frozenset()
    """Layers without rotary embedding (SmolLM3)."""
    qk_norm: bool = False
    """Whether queries and keys are normalized per head."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    moe: MoeConfig | None = None
    """Mixture of experts; None in dense models."""
    linear: LinearAttentionConfig | None = None
    """Linear attention layers, if any."""
    short_conv: int | None = None
    """Kernel size of the convolution in layers without attention, including the current position (LFM2)."""
    short_conv_bias: bool = False
    mamba: MambaConfig | None = None
    """Mamba-2 layers, if any."""
    shared_blocks: SharedBlocks | None = None
    """Attention blocks that several layers share (Zamba2)."""
    mamba1: Mamba1Config | None = None
    """Mamba layers with a selective scan, if any."""
    key_multiplier: float = 1.0
    attention_in_multiplier: float = 1.0
    attention_out_multiplier: float = 1.0
    mlp_multipliers: tuple[float, float] = (1.0, 1.0)
    """Factors of keys, of the attention's input and output, and of the MLP's gate and output (Falcon-H1)."""
    gemma3n: Gemma3nConfig | None = None
    """Gemma 3n's alternating updates, augmented residuals and sparse activations; None in other models."""
    layer_inputs: LayerInputsConfig | None = None
    """Per-layer token embeddings (Gemma 3n, Gemma 4); None in other models."""
    shared_kv_layers: Mapping[int, int] = field(default_factory=dict)
    """Layer without a KV cache of its own -> layer whose keys and values it reads (Gemma 3n, Gemma 4)."""
    wide_shared_mlp: bool = False
    """Whether the MLPs of the layers in :attr:`shared_kv_layers` have twice the intermediate size (Gemma 4)."""
    mla: MlaConfig | None = None
    """Multi-head latent attention, where :attr:`head_dim` is the rotated part of a head; None: other attention."""
    index: IndexerConfig | None = None
    """Indexer of sparse attention (DeepSeek-V3.2); None: rows attend to all earlier positions."""
    num_skipped_layers: int = 0
    """Number of layers after the last one that the checkpoint has but the engine skips (DeepSeek-V3's MTP layers)."""
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    dtype: str | None
    """Dtype of the weights as named in config.json, if given."""

    def of_layer(self, layer: int) -> "ModelConfig":
        """Return this config with the number of key/value heads and the head size of ``layer``."""
        if self.layer_types[layer] != FULL or self.full_head_dim is None or self.full_kv_heads is None:
            return self
        return replace(self, num_kv_heads=self.full_kv_heads, head_dim=self.full_head_dim)

    def window(self, layer: int) -> int | None:
        """Return how many positions ``layer`` attends to at most, including the current one; None: full attention."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else self.chunk(layer)

    def chunk(self, layer: int) -> int | None:
        """Return the attention chunk size of ``layer`` in positions; None without chunks or if one covers all."""
        size = self.chunk_size if self.layer_types[layer] == CHUNKED else None
        return size if size is not None and size < self.max_positions else None

    @property
    def linear_layers(self) -> tuple[int, ...]:
        """Layers with a recurrent state."""
        return tuple(layer for layer, kind in enumerate(self.layer_types) if kind in (LINEAR, HYBRID))

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Layers with a KV cache of their own."""
        without = {LINEAR, MLP, EXPERTS}
        kinds = enumerate(self.layer_types)
        return tuple(layer for layer, kind in kinds if kind not in without and layer not in self.shared_kv_layers)

    @property
    def is_prefix_shareable(self) -> bool:
        """Whether equal prefixes have equal keys; false if the RoPE depends on the length of the request."""
        return not any(rope is not None and rope.depends_on_length for rope in (self.rope, self.local_rope))

    def facts(self) -> dict[str, int | float]:
        """Return the sizes that determine tensor layouts, under their keys in config.json."""
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
        """Raise UsageError if ``tp`` exceeds the number of heads; sizes need not be divisible by ``tp``."""
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

        Unsupported settings that would change results raise an error that names the key and its value. ``architecture``
        (a key of :data:`FAMILIES`) overrides the one in config.json.
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
    """Return a reader for ``text_config`` of a multimodal model, with the family's defaults."""
    section = reader.section("text_config")
    if section is None:
        raise reader.fail("text_config", "expected a JSON object with the decoder's settings")
    tied = {name: reader.values[name] for name in ("tie_word_embeddings",) if reader.get(name) is not None}
    given = {name: value for name, value in section.values.items() if value is not None}
    return ConfigReader(reader.path, {**family.text_defaults, **given, **tied})


def _architecture(reader: ConfigReader) -> str:
    """Return the first entry of ``architectures``, or the architecture for ``model_type`` if the list is empty.

    Raises CheckpointError if it is not supported.
    """
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
    """Return ``dtype`` (formerly ``torch_dtype``) from the first reader that has it; None if not given."""
    for reader in readers:
        for name in ("dtype", "torch_dtype"):
            value = reader.get(name)
            if value is not None and not isinstance(value, str):
                raise reader.fail(name, 'expected the name of a dtype, such as "bfloat16"')
            if value:
                return str(value)
    return None


def _eos(reader: ConfigReader, folder: Path) -> tuple[int, ...]:
    """Read the end tokens; generation_config.json, if present, overrides config.json, as in transformers."""
    path = folder / "generation_config.json"
    value = ConfigReader.open(path).get("eos_token_id") if path.exists() else None
    value = reader.get("eos_token_id") if value is None else value
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(type(token) is not int for token in ids):
        raise CheckpointError(f"{reader.path}: eos_token_id is {value!r}; it must be a token id or a list of them")
    return tuple(ids)
