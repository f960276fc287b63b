"""EngineConfig: every setting of the engine with its type, its default and its rules."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from tapscope.core.convert import Count, Positive, PositiveInt, convert_fields
from tapscope.core.deprecation import deprecated_fields, renamed
from tapscope.core.errors import ConfigError
from tapscope.engine.params.sampling_params import derive_seed

Rendezvous = Annotated[str, Meta(pattern=r"^tcp://[^\s:/]+:[0-9]{1,5}$", extra={"must be": "tcp://HOST:PORT"})]


DEPRECATED_NAMES = {
    "max_running": "max_num_seqs",
    "max_tokens_per_step": "max_num_batched_tokens",
    "kv_bytes": "kv_cache_memory_bytes",
    "ageing_steps": "priority_aging_steps",
    "check": "check_invariants",
}
"""Former names of settings, accepted for one release."""


@deprecated_fields(DEPRECATED_NAMES)
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine; raises ConfigError naming the field, the value and the rule."""

    model: str
    """Directory of a Hugging Face checkpoint: config.json, *.safetensors, and tokenizer.json for text."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of weights and activations: ``float32``, ``bfloat16``, ``float16``; ``auto``: what config.json says."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """``cpu``, ``cuda`` (rank r on the r-th GPU), or ``auto``: the GPU where there is one."""
    tp: PositiveInt = 1
    """Tensor-parallel ranks; at most one a query head."""
    ep: PositiveInt = 1
    """Expert-parallel groups among the ``tp`` ranks, which it divides: each holds a block of every layer's experts."""
    dp: PositiveInt = 1
    """Data-parallel replicas behind one server or LLM, each an engine of ``tp`` ranks."""
    dp_rank: Count = 0
    """Which of the ``dp`` replicas this engine is; whoever starts it sets it."""
    page_size: PositiveInt = 16
    """Token positions in one page of the KV cache."""
    num_pages: PositiveInt | None = None
    """Pages of the KV cache; None takes as many as ``max_num_seqs`` longest requests need, within
    ``kv_cache_memory_bytes``."""
    max_num_seqs: PositiveInt = 64
    """Requests computed in one step; the rest wait."""
    max_num_batched_tokens: PositiveInt | None = None
    """Rows of one step; longer prompts take several steps. None is 512 on a CPU and 8192 on a GPU."""
    prefix_cache: bool = True
    """Keep the pages of computed tokens, so that a prompt that begins with them need not compute them again."""
    prefix_affinity: bool = True
    """Of several replicas prefer the one that has computed a prompt's beginning, unless it is much busier."""
    watermark: Annotated[float, Meta(ge=0, lt=1)] = 0.01
    """Share of the pages that must be left when a request joins others: room for them to grow."""
    priority_aging_steps: PositiveInt = 256
    """A waiting request gains on later ones of higher priority: one level of priority after so many steps."""
    waiting_timeout_s: Positive | None = None
    """A request not started after so long is aborted; None never is."""
    running_timeout_s: Positive | None = None
    """A request not finished so long after it started is aborted; None never is."""
    check_invariants: bool = False
    """Walk all the scheduler's books after every step and fail it when they do not add up; slow."""
    load_format: Literal["auto", "dummy"] = "auto"
    """``auto`` reads the checkpoint's safetensors; ``dummy`` needs config.json alone and makes random weights."""
    quantization: Literal["fp8"] | None = None
    """``fp8`` rounds the weights of linear layers to e4m3, one scale an output channel; None leaves them."""
    exclude_modules: tuple[str, ...] = ()
    """Globs of module paths that ``quantization`` leaves alone, such as ``*.down_proj``; see :meth:`build`."""
    kv_cache_dtype: Literal["auto", "bfloat16", "float16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2"] = "auto"
    """Type that the KV cache is stored in: ``bfloat16``, ``float16``, ``float32``, ``fp8_e4m3`` (short: ``fp8``),
    ``fp8_e5m2``; ``auto``: what the checkpoint's quantisation says, else the type of the model."""
    quantization_param_path: str | None = None
    """JSON file with the scales of an FP8 KV cache; they come before the checkpoint's own."""
    kv_cache_memory_bytes: PositiveInt = 1 << 30
    """Upper bound of the KV cache on each rank while ``num_pages`` is None."""
    logits: Literal["last", "all", "observed"] = "last"
    """``last``: lm_head sees the rows to sample from; ``all``: every row; ``observed``: every row while an observer's
    taps are in place, else the last ones."""
    seed: Count = 0
    """Seed of sampling, written into manifests; greedy decoding draws nothing."""
    batch_invariant: bool = False
    """The same request gives the same bits alone and in any batch, chunk or prefix hit; slower."""
    launch: Literal["spawn", "external"] = "spawn"
    """``spawn``: rank 0 starts the others. ``external``: torchrun or the like started all ``tp``, each makes this LLM,
    which returns on rank 0 only; the others obey it, and exit when it closes."""
    cuda_graphs: Literal["decode", "off"] = "decode"
    """``decode``: on a GPU, steps that only decode run as CUDA graphs; ``off``: every step runs kernel by kernel."""
    async_scheduling: bool = True
    """On a GPU, plan and start a decoding step while the one before runs; a request that has ended meanwhile costs one
    row more."""
    rendezvous: Rendezvous | None = None
    """``tcp://HOST:PORT`` on rank 0's machine, where externally launched ranks meet; None: MASTER_ADDR, MASTER_PORT."""
    rank_timeout_s: Positive = 60.0
    """A rank or replica that shows no sign of life for longer though others need it is lost: none of its layers,
    collectives, messages. A loading one has ten times as long."""

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

    def step_tokens(self, device_type: str) -> int:
        """``max_num_batched_tokens`` on a device of this type."""
        return self.max_num_batched_tokens or (512 if device_type == "cpu" else 8192)

    @property
    def has_affinity(self) -> bool:
        """Whether a request's prefix counts when its replica is chosen."""
        return self.prefix_cache and self.prefix_affinity

    def replica_seed(self) -> int:
        """What this replica's requests without a seed of their own are seeded from; no two replicas draw alike."""
        return derive_seed(self.seed, -self.dp_rank) if self.dp_rank else self.seed

    @classmethod
    def build(cls, model: "str | Path | EngineConfig", settings: Mapping[str, Any]) -> "EngineConfig":
        """From a path and keyword settings; a config passes through, then no settings may come with it."""
        if isinstance(model, EngineConfig):
            if settings:
                raise ConfigError(f"{', '.join(settings)} given beside an EngineConfig; set it in the config instead")
            return model
        settings = renamed(settings, DEPRECATED_NAMES, ConfigError)
        known = [field.name for field in fields(cls) if field.name != "model"]
        unknown = [name for name in settings if name not in known]
        if unknown:
            raise ConfigError(f"unknown engine setting {unknown[0]!r}; valid settings: {', '.join(known)}")
        return cls(model=str(model), **{name: _plain(name, value) for name, value in settings.items()})


def _plain(name: str, value: Any) -> Any:
    """A setting as the field holds it: globs may also be a list or, on a command line, joined by commas."""
    if name == "exclude_modules":
        globs = value.split(",") if isinstance(value, str) else value
        return tuple(globs) if isinstance(globs, list) else globs
    return str(value) if name == "quantization_param_path" and isinstance(value, Path) else value
