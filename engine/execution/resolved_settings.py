"""Values that settings leave open: device, dtype, number of pages, scales. Equal on all ranks except the device."""

from pathlib import Path

import torch

from tapscope.core.errors import ConfigError
from tapscope.engine.hf_config.model_config import ModelConfig
from tapscope.engine.params.engine_config import EngineConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(config: EngineConfig, rank: int) -> torch.device:
    """The device of tensor-parallel rank ``rank`` on its machine; DP replica r uses the GPUs from r * tp on.

    Raises ConfigError when there is no such GPU, or when the spawned ranks together need more than there are.
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
    """The dtype to compute in; raises ConfigError when ``auto`` finds one that this engine does not support."""
    if config.dtype != "auto":
        return config.dtype
    name = model_config.dtype or "float32"
    if name not in DTYPES:
        raise ConfigError(
            f"dtype='auto': config.json has unsupported dtype {name!r}; set dtype to one of {', '.join(DTYPES)}"
        )
    return name


def resolve_scale_file(config: EngineConfig, kv_dtype: str) -> Path:
    """The scale file that ``config`` names; raises ConfigError when the KV cache is not FP8."""
    path = Path(config.quantization_param_path or "")
    if kv_dtype not in ("fp8_e4m3", "fp8_e5m2"):
        rule = f"requires an FP8 KV cache, but it is {kv_dtype}; set kv_cache_dtype='fp8'"
        raise ConfigError(f"quantization_param_path={str(path)!r}: {rule}")
    return path


def num_pages(config: EngineConfig, max_positions: int, position_bytes: int) -> int:
    """Pages of each rank's cache; equal on all ranks. Raises ConfigError when kv_cache_memory_bytes is below one."""
    if config.num_pages is not None:
        return config.num_pages
    page_bytes = config.page_size * position_bytes
    wanted = config.max_num_seqs * -(-max_positions // config.page_size)
    if config.kv_cache_memory_bytes < page_bytes:
        raise ConfigError(
            f"kv_cache_memory_bytes={config.kv_cache_memory_bytes}: must hold at least one page of {page_bytes} bytes"
        )
    return min(wanted, config.kv_cache_memory_bytes // page_bytes)
