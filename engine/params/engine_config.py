"""EngineConfig: every setting of the engine with type, default and rules."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from tapscope.core.convert import Count, NonEmptyStr, Positive, PositiveInt, convert_fields, must_be
from tapscope.core.deprecation import deprecated_fields, renamed
from tapscope.core.errors import ConfigError
from tapscope.engine.params.sampling_params import derive_seed

Rendezvous = Annotated[str, Meta(pattern=r"^tcp://[^\s:/]+:[0-9]{1,5}$"), must_be("tcp://HOST:PORT")]


DEPRECATED_NAMES = {
    "max_running": "max_num_seqs",
    "max_tokens_per_step": "max_num_batched_tokens",
    "kv_bytes": "kv_cache_memory_bytes",
    "ageing_steps": "priority_aging_steps",
    "check": "check_invariants",
}
"""Former names of settings, accepted for one release."""

_SPECULATIVE = (
    "speculative_draft_model_path",
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
)
"""Settings that require ``speculative_algorithm``."""
_NGRAM_WINDOWS = ("speculative_ngram_min_match_window_size", "speculative_ngram_max_match_window_size")
_MAX_LORAS = 8


@deprecated_fields(DEPRECATED_NAMES)
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine. Raises ConfigError naming the field, the value and the violated rule."""

    model: str
    """Directory of a Hugging Face checkpoint: config.json, *.safetensors, and tokenizer.json for text."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """dtype of weights and activations: ``float32``, ``bfloat16``, ``float16``; ``auto``: the one in config.json."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """``cpu``, ``cuda`` (rank r on the r-th GPU), or ``auto``: a GPU if there is one."""
    tp: PositiveInt = 1
    """Tensor-parallel ranks; at most one per query head."""
    ep: PositiveInt = 1
    """Expert-parallel groups; must divide ``tp``. Each group holds a block of every layer's experts."""
    dp: PositiveInt = 1
    """Data-parallel replicas of one server or LLM; each is an engine of ``tp`` ranks."""
    dp_rank: Count = 0
    """Index of this engine among the ``dp`` replicas; set by the process that starts it."""
    max_model_len: Annotated[int, Meta(ge=2)] | None = None
    """Maximum number of prompt and generated tokens of a request (SGLang: ``context_length``). None: the model's number
    of positions, which is also the upper limit.
    """
    page_size: PositiveInt = 16
    """Token positions in one page of the KV cache."""
    num_pages: PositiveInt | None = None
    """Pages of the KV cache; None: enough for ``max_num_seqs`` requests of maximum length, up to
    ``kv_cache_memory_bytes``."""
    swa_full_tokens_ratio: Annotated[float, Meta(gt=0, le=1)] | None = None
    """In models that mix sliding-window and full attention: size of the windowed layers' page pool relative to that of
    the full layers. None: enough for the windows of ``max_num_seqs`` requests and the rows of a step.
    """
    num_state_slots: PositiveInt | None = None
    """Slots of recurrent state in models with linear attention: two per running request, the others for checkpoints.
    None: four for each of ``max_num_seqs`` requests and one for each of its draft tokens, in at most half of
    ``kv_cache_memory_bytes``.
    """
    state_checkpoint_interval: PositiveInt = 256
    """Positions between checkpoints of recurrent states, from which prefix hits resume; rounded up to pages."""
    max_num_seqs: PositiveInt = 64
    """Maximum number of requests computed in one step; the others wait."""
    max_num_batched_tokens: PositiveInt | None = None
    """Maximum number of tokens in one step; longer prompts take several steps. None: 512 on a CPU, 8192 on a GPU."""
    prefix_cache: bool = True
    """Keep the pages of computed tokens and reuse them for prompts with the same prefix."""
    prefix_affinity: bool = True
    """Route a request to the replica that has cached its prefix, unless that replica is much busier."""
    watermark: Annotated[float, Meta(ge=0, lt=1)] = 0.01
    """Fraction of the pages that must stay free when a request is admitted, so that running requests can grow."""
    priority_aging_steps: PositiveInt = 256
    """Steps after which the priority of a waiting request rises by one level."""
    waiting_timeout_s: Positive | None = None
    """Seconds after which a request that has not started is aborted; None: never."""
    running_timeout_s: Positive | None = None
    """Seconds after which a started request that has not finished is aborted; None: never."""
    check_invariants: bool = False
    """Check the scheduler's invariants after every step and fail the step if one is violated; slow."""
    load_format: Literal["auto", "dummy"] = "auto"
    """``auto`` reads the checkpoint's safetensors; ``dummy`` needs only config.json and creates random weights."""
    quantization: Literal["fp8"] | None = None
    """``fp8`` rounds the weights of linear layers to e4m3 with one scale per output channel; None keeps them."""
    exclude_modules: tuple[str, ...] = ()
    """Globs of module paths that ``quantization`` skips, such as ``*.down_proj``; a string is split at commas."""
    quantized_layers: Literal["auto", "weight_only", "dequantize"] = "auto"
    """``auto``: linear layers and experts of a quantized checkpoint keep their 8- or 4-bit weights, and inputs are
    quantized if its config requires it; ``weight_only``: like ``auto``, but inputs are not quantized; ``dequantize``:
    weights are converted to ``dtype``.
    """
    kv_cache_dtype: Literal["auto", "bfloat16", "float16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2"] = "auto"
    """dtype of the stored KV cache: ``bfloat16``, ``float16``, ``float32``, ``fp8_e4m3`` (short: ``fp8``),
    ``fp8_e5m2``; ``auto``: the one in the checkpoint's quantization config, else the model's dtype."""
    quantization_param_path: NonEmptyStr | None = None
    """JSON file with the scales of an FP8 KV cache; they take precedence over the checkpoint's."""
    kv_cache_memory_bytes: PositiveInt = 1 << 30
    """Maximum size of the KV cache on each rank; used when ``num_pages`` is None. On a GPU, also limited to the memory
    left by the weights, the largest step and the CUDA graphs, minus 5 % of the GPU's memory.
    """
    logits: Literal["last", "all", "observed"] = "last"
    """Rows for which lm_head computes logits: ``last``: sampled rows; ``all``: every row; ``observed``: every row while
    an observer's taps are attached, else like ``last``.
    """
    seed: Count = 0
    """Seed of sampling, recorded in manifests; greedy decoding does not use it."""
    batch_invariant: bool = False
    """A request's output is bit-identical in any batch, with any chunking and any prefix hit; slower."""
    launch: Literal["spawn", "external"] = "spawn"
    """``spawn``: rank 0 starts the others. ``external``: a launcher such as torchrun started all ``tp`` processes and
    each creates this LLM. The constructor returns on rank 0 only; the other ranks execute its steps and exit when it
    closes.
    """
    cuda_graphs: Literal["decode", "all", "off"] = "all"
    """``all``: on a GPU, steps run as CUDA graphs if the model and the settings allow it. Steps with prompts do so only
    up to the number of tokens beyond which the GPU is the bottleneck, and each size is captured at first use.
    ``decode``: only steps without prompts; ``off``: no CUDA graphs.
    """
    custom_all_reduce: bool | None = None
    """All-reduce small tensors of spawned ranks on GPUs with one kernel, which reads the memory of the other GPUs and
    adds in float32, in rank order, instead of with NCCL. None: if the GPUs can read each other's memory.
    """
    async_scheduling: bool = True
    """On a GPU, plan and launch a decode step while the previous one runs; a request that has finished meanwhile costs
    one extra row."""
    speculative_algorithm: Literal["NGRAM", "STANDALONE", "NEXTN", "EAGLE", "EAGLE3"] | None = None
    """Speculative decoding, under SGLang's names: ``NGRAM`` proposes the tokens that followed an earlier occurrence of
    the request's last tokens, ``STANDALONE`` those that a smaller checkpoint generates, ``NEXTN`` those that the
    model's MTP layer predicts, ``EAGLE`` and ``EAGLE3`` those that an EAGLE head predicts. Outputs stay the same. None:
    off.
    """
    speculative_draft_model_path: NonEmptyStr | None = None
    """Directory of the draft checkpoint of ``STANDALONE``, which must have the target's vocabulary, or of the head of
    ``EAGLE`` and ``EAGLE3``. ``EAGLE`` without one is ``NEXTN``.
    """
    speculative_num_steps: PositiveInt | None = None
    """Draft tokens in sequence, or levels of a tree, per request and step. None: one less than
    ``speculative_num_draft_tokens``; for trees 3.
    """
    speculative_eagle_topk: PositiveInt | None = None
    """Number of most likely tokens that a draft tree considers after each of its tokens; 1 or None: chains. Only for
    heads (``NEXTN``, ``EAGLE``, ``EAGLE3``).
    """
    speculative_num_draft_tokens: Annotated[int, Meta(ge=2)] | None = None
    """Rows to verify per request and step: the last token and the draft tokens. None: 8 for ``NGRAM`` and trees, else
    4.
    """
    speculative_ngram_min_match_window_size: PositiveInt = 2
    """Minimum match length of ``NGRAM``: number of last tokens that must occur earlier in the request."""
    speculative_ngram_max_match_window_size: PositiveInt = 12
    """Maximum match length of ``NGRAM`` in tokens; longer matches count as equal, and the latest is continued."""
    enable_lora: bool = False
    """Serve LoRA adapters, which can be loaded while the engine runs; implied by ``lora_paths``."""
    lora_paths: tuple[Annotated[str, Meta(pattern=r"^[^=]+=."), must_be("NAME=DIR")], ...] = ()
    """LoRA adapters to load, as ``NAME=DIR``: directories with PEFT's adapter_config.json and
    adapter_model.safetensors.
    """
    max_loras_per_batch: PositiveInt = _MAX_LORAS
    """Maximum number of different LoRA adapters in one step and on the device; requests for other adapters wait."""
    max_lora_rank: PositiveInt | None = None
    """Maximum rank of a LoRA adapter. None: the largest of ``lora_paths``, at least 16."""
    profile_dir: NonEmptyStr | None = None
    """Directory to which /start_profile and /stop_profile write traces of the PyTorch profiler; None: both are
    refused.
    """
    rendezvous: Rendezvous | None = None
    """``tcp://HOST:PORT`` of rank 0, where externally launched ranks connect; None: MASTER_ADDR and MASTER_PORT."""
    rank_timeout_s: Positive = 60.0
    """Seconds without a heartbeat (a layer, a collective or a message) after which a rank or replica that others wait
    for is considered lost; ten times as long while it loads."""

    def __post_init__(self) -> None:
        convert_fields(self, ConfigError)
        if self.tp % self.ep:
            raise ConfigError(f"ep={self.ep}: must divide tp={self.tp}")
        if self.dp_rank >= self.dp:
            raise ConfigError(f"dp_rank={self.dp_rank}: must be below dp={self.dp}")
        if self.dp > 1 and self.launch != "spawn":
            raise ConfigError(f"dp={self.dp}: needs launch='spawn'")
        if self.rendezvous is not None and self.launch != "external":
            raise ConfigError(f"rendezvous={self.rendezvous!r}: needs launch='external'")
        if self.exclude_modules and self.quantization is None:
            raise ConfigError(f"exclude_modules={self.exclude_modules!r}: needs quantization, which it restricts")
        self._check_speculation()
        names = [name for name, _ in self.adapters]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ConfigError(f"lora_paths: {twice!r} is given twice; adapters need different names")
        for name, default in (("max_lora_rank", None), ("max_loras_per_batch", _MAX_LORAS)):
            if (value := getattr(self, name)) != default and not self.has_lora:
                raise ConfigError(f"{name}={value}: needs enable_lora or lora_paths")

    @property
    def has_lora(self) -> bool:
        """Whether the engine can serve LoRA adapters."""
        return self.enable_lora or bool(self.lora_paths)

    @property
    def adapters(self) -> tuple[tuple[str, str], ...]:
        """(name, directory) of each adapter in ``lora_paths``."""
        parts = (item.partition("=") for item in self.lora_paths)
        return tuple((name, folder) for name, _, folder in parts)

    def _check_speculation(self) -> None:
        """Raise ConfigError for inconsistent settings of speculative decoding."""
        algorithm = self.speculative_algorithm
        shortest, longest = (getattr(self, name) for name in _NGRAM_WINDOWS)
        given = {name: getattr(self, name) for name in _SPECULATIVE if getattr(self, name) is not None}
        if algorithm is None and given:
            name, value = next(iter(given.items()))
            raise ConfigError(f"{name}={value!r}: needs speculative_algorithm, such as 'NGRAM'")
        if algorithm in ("STANDALONE", "EAGLE3") and self.speculative_draft_model_path is None:
            raise ConfigError(f"speculative_algorithm={algorithm!r}: needs speculative_draft_model_path")
        if algorithm in ("NGRAM", "NEXTN") and self.speculative_draft_model_path is not None:
            path = f"speculative_draft_model_path={self.speculative_draft_model_path!r}"
            what = "has no draft model" if algorithm == "NGRAM" else "takes the MTP layer of the model itself"
            raise ConfigError(f"{path}: {algorithm!r} {what}; use 'STANDALONE', 'EAGLE' or 'EAGLE3'")
        steps, rows = self.speculative_num_steps, self.speculative_num_draft_tokens
        self._check_tree()
        if not self.has_draft_trees and steps is not None and rows is not None and rows != steps + 1:
            raise ConfigError(
                f"speculative_num_draft_tokens={rows}: must be speculative_num_steps + 1 = {steps + 1}: the drafts and "
                "the last token"
            )
        if shortest > longest:
            raise ConfigError(f"{_NGRAM_WINDOWS[0]}={shortest}: must be at most {_NGRAM_WINDOWS[1]}={longest}")
        defaults = {each.name: each.default for each in fields(self)}
        for name in _NGRAM_WINDOWS if algorithm != "NGRAM" else ():
            if (value := getattr(self, name)) != defaults[name]:
                raise ConfigError(f"{name}={value}: needs speculative_algorithm='NGRAM'")

    def _check_tree(self) -> None:
        """Raise ConfigError for inconsistent settings of draft trees."""
        branches, rows = self.speculative_eagle_topk, self.speculative_num_draft_tokens
        if branches is None or branches == 1:
            return
        setting = f"speculative_eagle_topk={branches}"
        if not self.has_draft_head:
            raise ConfigError(
                f"{setting}: {self.speculative_algorithm!r} proposes chains; trees need 'NEXTN', 'EAGLE' or 'EAGLE3'"
            )
        if branches > (self.max_num_batched_tokens or branches):
            raise ConfigError(f"{setting}: must be at most max_num_batched_tokens={self.max_num_batched_tokens}")
        most = self._largest_tree
        if rows is not None and rows - 1 > most:
            raise ConfigError(
                f"speculative_num_draft_tokens={rows}: {setting} and speculative_num_steps={self.draft_depth} give a "
                f"tree of {most} tokens; use at most {most + 1}"
            )

    @property
    def has_draft_trees(self) -> bool:
        """Whether drafts are trees."""
        return (self.speculative_eagle_topk or 1) > 1

    @property
    def draft_depth(self) -> int:
        """Maximum number of draft tokens in sequence per step; 0 without speculative decoding."""
        return self.speculative_num_steps or 3 if self.has_draft_trees else self.num_drafts

    @property
    def _largest_tree(self) -> int:
        branches = self.speculative_eagle_topk or 1
        return branches + (self.draft_depth - 1) * branches**2

    @property
    def num_drafts(self) -> int:
        """Maximum number of draft tokens of a request per step, over all branches; 0 without speculative decoding."""
        if self.speculative_algorithm is None:
            return 0
        if self.has_draft_trees:
            return (self.speculative_num_draft_tokens or min(8, self._largest_tree + 1)) - 1
        default = 7 if self.speculative_algorithm == "NGRAM" else 3
        rows = self.speculative_num_draft_tokens
        return self.speculative_num_steps or (default if rows is None else rows - 1)

    @property
    def has_draft_head(self) -> bool:
        """Whether a head drafts from the target's hidden states."""
        return self.speculative_algorithm in ("NEXTN", "EAGLE", "EAGLE3")

    def draft_config(self, num_pages: int) -> "EngineConfig | None":
        """Return the settings of the draft checkpoint or head, whose cache has ``num_pages``; None if there is none."""
        if self.speculative_draft_model_path is None and not self.has_draft_head:
            return None
        off: dict[str, Any] = dict.fromkeys(("speculative_algorithm", *_SPECULATIVE))
        return replace(
            self,
            model=self.speculative_draft_model_path or self.model,
            num_pages=num_pages,
            swa_full_tokens_ratio=None,
            num_state_slots=None,
            quantization_param_path=None,
            cuda_graphs=self.cuda_graphs if self.tp == 1 else "off",
            logits="last",
            enable_lora=False,
            lora_paths=(),
            max_lora_rank=None,
            max_loras_per_batch=_MAX_LORAS,
            **off,
        )

    def step_tokens(self, device_type: str) -> int:
        """Return ``max_num_batched_tokens``, or its default on a device of type ``device_type``."""
        return self.max_num_batched_tokens or (512 if device_type == "cpu" else 8192)

    @property
    def has_affinity(self) -> bool:
        """Whether routing to a replica takes the request's prefix into account."""
        return self.prefix_cache and self.prefix_affinity

    def replica_seed(self) -> int:
        """Return the seed for this replica's requests without a seed; different for every replica."""
        return derive_seed(self.seed, -self.dp_rank) if self.dp_rank else self.seed

    @classmethod
    def build(cls, model: "str | Path | EngineConfig", settings: Mapping[str, Any]) -> "EngineConfig":
        """Build from a path and keyword settings. An EngineConfig is returned unchanged and allows no settings.

        Raises ConfigError for an unknown setting or an invalid value.
        """
        if isinstance(model, EngineConfig):
            if settings:
                raise ConfigError(f"{', '.join(settings)} given with an EngineConfig; set it in the config instead")
            return model
        settings = renamed(settings, DEPRECATED_NAMES, ConfigError)
        known = [field.name for field in fields(cls) if field.name != "model"]
        unknown = [name for name in settings if name not in known]
        if unknown:
            raise ConfigError(f"unknown engine setting {unknown[0]!r}; valid settings: {', '.join(known)}")
        return cls(model=str(model), **{name: _normalized(name, value) for name, value in settings.items()})


def _normalized(name: str, value: Any) -> Any:
    """Convert ``value`` to the type of field ``name``.

    Globs may be a tuple, a list or a comma-separated string; adapters a mapping of names to directories; paths become
    str.
    """
    if name == "lora_paths":
        return tuple(f"{key}={path}" for key, path in value.items()) if isinstance(value, Mapping) else tuple(value)
    if name == "exclude_modules":
        globs = value.split(",") if isinstance(value, str) else value
        return tuple(globs) if isinstance(globs, list) else globs
    return str(value) if name in _PATHS and isinstance(value, Path) else value


_PATHS = ("quantization_param_path", "speculative_draft_model_path", "profile_dir")
