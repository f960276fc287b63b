"""What the settings leave open, decided: device, type, pages, scales. Equal on all ranks but for the device."""

from pathlib import Path

import torch

from tapscope.core.errors import ConfigError
from tapscope.engine.hf_config.model_config import ModelConfig
from tapscope.engine.params.engine_config import EngineConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def device_of(config: EngineConfig, rank: int) -> torch.device:
    """The device of tensor-parallel rank ``rank``, by its number on its machine: DP replica r has GPUs from r * tp on.

    Raises ConfigError when there is no such GPU, and where the ranks to be spawned together need more than there are.
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


def dtype_name(config: EngineConfig, model_config: ModelConfig) -> str:
    """The type to compute in; raises ConfigError when ``auto`` meets one this engine does not have."""
    if config.dtype != "auto":
        return config.dtype
    name = model_config.dtype or "float32"
    if name not in DTYPES:
        raise ConfigError(f"dtype='auto': config.json says {name!r}; choose one of {', '.join(DTYPES)}")
    return name


def scale_file(config: EngineConfig, kv_dtype: str) -> Path:
    """The file of scales that ``config`` names; raises ConfigError where nothing is scaled."""
    path = Path(config.quantization_param_path or "")
    if kv_dtype not in ("fp8_e4m3", "fp8_e5m2"):
        rule = f"needs an FP8 cache, and this one is {kv_dtype}; set kv_cache_dtype='fp8'"
        raise ConfigError(f"quantization_param_path={str(path)!r}: {rule}")
    return path


def num_pages(config: EngineConfig, max_positions: int, position_bytes: int) -> int:
    """Pages of each rank's cache; equal on all ranks. Raises ConfigError when kv_bytes does not hold one."""
    if config.num_pages is not None:
        return config.num_pages
    page_bytes = config.page_size * position_bytes
    wanted = config.max_running * -(-max_positions // config.page_size)
    if config.kv_bytes < page_bytes:
        raise ConfigError(f"kv_bytes={config.kv_bytes}: must hold at least one page, which takes {page_bytes} bytes")
    return min(wanted, config.kv_bytes // page_bytes)
