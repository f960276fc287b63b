"""Resolved settings: device, dtype, LoRA rank and scale file. Equal on all ranks, except the device."""

from dataclasses import replace
from pathlib import Path

import torch

from tapscope.core.errors import ConfigError
from tapscope.engine.checkpoint.peft_adapter import PeftAdapter
from tapscope.engine.hf_config.model_config import ModelConfig
from tapscope.engine.params.engine_config import EngineConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_length(config: EngineConfig, model_config: ModelConfig) -> ModelConfig:
    """Limit ``model_config`` to ``max_model_len`` positions; raises ConfigError if the model has fewer."""
    asked, most = config.max_model_len, model_config.max_positions
    if asked is None:
        return model_config
    if asked > most:
        raise ConfigError(
            f"max_model_len={asked}: the model has {most} positions (max_position_embeddings of config.json, extended "
            f"by its RoPE scaling); use at most {most}"
        )
    return replace(model_config, max_positions=asked)


def resolve_device(config: EngineConfig, rank: int) -> torch.device:
    """Return the device of tensor-parallel rank ``rank`` on its machine; DP replica r uses the GPUs from r * tp on.

    Raises ConfigError if that GPU does not exist, or if the spawned ranks need more GPUs than there are.
    """
    num_gpus = torch.cuda.device_count()
    if config.device == "cpu" or (config.device == "auto" and not num_gpus):
        return torch.device("cpu")
    needed = config.dp * config.tp if config.launch == "spawn" else 1
    if needed > max(1, num_gpus):
        who = f"dp={config.dp} replicas of tp={config.tp} ranks" if config.dp > 1 else f"tp={config.tp} ranks"
        raise ConfigError(
            f"device={config.device!r}: {who} need {needed} GPUs but there are {num_gpus}; use fewer, or device='cpu'"
        )
    if rank >= num_gpus:
        raise ConfigError(
            f"device={config.device!r}: rank {rank} needs GPU {rank} but there are {num_gpus}; use device='cpu'"
        )
    return torch.device("cuda", config.dp_rank * config.tp + rank)


def resolve_dtype(config: EngineConfig, model_config: ModelConfig) -> str:
    """Return the name of the compute dtype; raises ConfigError if ``auto`` resolves to an unsupported dtype."""
    if config.dtype != "auto":
        return config.dtype
    name = model_config.dtype or "float32"
    if name not in DTYPES:
        raise ConfigError(
            f"dtype='auto': config.json has unsupported dtype {name!r}; set dtype to one of {', '.join(DTYPES)}"
        )
    return name


def resolve_lora_rank(config: EngineConfig) -> int:
    """Return the maximum LoRA rank of adapters.

    Raises CheckpointError for an adapter of ``lora_paths`` that cannot be read, ConfigError for one of a larger rank.
    """
    ranks = {name: PeftAdapter.read(Path(folder)).rank for name, folder in config.adapters}
    if config.max_lora_rank is None:
        return max([16, *ranks.values()])
    large = next((name for name, rank in ranks.items() if rank > config.max_lora_rank), None)
    if large is not None:
        raise ConfigError(
            f"max_lora_rank={config.max_lora_rank}: adapter {large!r} has rank {ranks[large]}; raise max_lora_rank"
        )
    return config.max_lora_rank


def resolve_scale_file(config: EngineConfig, kv_dtype: str) -> Path | None:
    """Return the scale file that ``config`` names, if any; raises ConfigError if the KV cache is not FP8."""
    if not config.quantization_param_path:
        return None
    path = Path(config.quantization_param_path)
    if kv_dtype not in ("fp8_e4m3", "fp8_e5m2"):
        rule = f"requires an FP8 KV cache, but it is {kv_dtype}; set kv_cache_dtype='fp8'"
        raise ConfigError(f"quantization_param_path={str(path)!r}: {rule}")
    return path
