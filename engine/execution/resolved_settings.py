"""Values that settings leave open: device, dtype, number of pages, scales. Equal on all ranks except the device."""

import bisect
from collections.abc import Sequence
from pathlib import Path

import torch

from tapscope.core.errors import ConfigError
from tapscope.engine.checkpoint.peft_adapter import PeftAdapter
from tapscope.engine.hf_config.model_config import ModelConfig
from tapscope.engine.kv_cache.layer_group import LayerGroup
from tapscope.engine.kv_cache.state_cache import slot_bytes
from tapscope.engine.models.decoder import CausalLM
from tapscope.engine.params.engine_config import EngineConfig
from tapscope.engine.requests.page_table import max_request_pages
from tapscope.engine.requests.state_table import SLOTS_PER_REQUEST

_EMPTY_PAGES = 1 << 16
"""Pages of a model that caches no keys; they take no device memory, but a list entry each."""
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


def resolve_lora_rank(config: EngineConfig) -> int:
    """The largest rank of a LoRA adapter.

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


def resolve_scale_file(config: EngineConfig, kv_dtype: str) -> Path:
    """The scale file that ``config`` names; raises ConfigError when the KV cache is not FP8."""
    path = Path(config.quantization_param_path or "")
    if kv_dtype not in ("fp8_e4m3", "fp8_e5m2"):
        rule = f"requires an FP8 KV cache, but it is {kv_dtype}; set kv_cache_dtype='fp8'"
        raise ConfigError(f"quantization_param_path={str(path)!r}: {rule}")
    return path


def state_slots(config: EngineConfig, model: CausalLM, dtype: torch.dtype) -> tuple[int, int]:
    """Slots of recurrent states and their bytes on each rank, (0, 0) in models without; equal on all ranks.

    Raises ConfigError for too few slots, for more than kv_cache_memory_bytes holds, and for a model without states.
    """
    asked = config.num_state_slots
    if not model.config.linear_layers:
        if asked is not None:
            raise ConfigError(f"num_state_slots={asked}: {config.model} has no recurrent state; leave it out")
        return 0, 0
    # All ranks count the bytes of the one with the most units, so that their pools are equal.
    shapes = model.state_shapes(-(-model.state_units().total // model.tp.size))
    num_bytes = slot_bytes(len(model.config.linear_layers), *shapes, dtype.itemsize)
    memory = config.kv_cache_memory_bytes
    if config.num_drafts and not model.has_draft_states:
        algorithm = f"speculative_algorithm={config.speculative_algorithm!r}"
        raise ConfigError(f"{algorithm}: the recurrent state of {model.config.architecture} cannot be restored yet")
    if config.has_draft_trees:
        raise ConfigError(
            f"speculative_eagle_topk={config.speculative_eagle_topk}: a tree needs a recurrent state for each branch, "
            f"which is not supported ({model.config.architecture}); use 1"
        )
    wanted = (4 + config.num_drafts) * config.max_num_seqs
    slots = min(wanted, memory // 2 // num_bytes) if asked is None else asked
    if slots < SLOTS_PER_REQUEST:
        raise ConfigError(
            f"kv_cache_memory_bytes={memory}: half of it must hold {SLOTS_PER_REQUEST} recurrent states of {num_bytes} "
            "bytes; raise it"
            if asked is None
            else f"num_state_slots={slots}: a request needs {SLOTS_PER_REQUEST}"
        )
    if slots * num_bytes >= memory:
        raise ConfigError(
            f"num_state_slots={slots}: slots of {num_bytes} bytes leave no page of kv_cache_memory_bytes={memory}; "
            f"use at most {(memory - 1) // num_bytes}"
        )
    return slots, slots * num_bytes


def group_pages(
    config: EngineConfig,
    groups: Sequence[LayerGroup],
    position_bytes: Sequence[int],
    max_positions: int,
    step_tokens: int,
) -> tuple[int, ...]:
    """Pages of each cache group on each rank; equal on all ranks.

    ``position_bytes``: bytes of a position in all layers of each group. Windowed groups after the first get pages for
    the windows of ``max_num_seqs`` requests and the rows of a step, or ``swa_full_tokens_ratio`` of the first group's;
    never more than the first group. Raises ConfigError when kv_cache_memory_bytes holds no page of each group.
    """
    if len(groups) == 1 and config.swa_full_tokens_ratio is not None:
        ratio = f"swa_full_tokens_ratio={config.swa_full_tokens_ratio}"
        raise ConfigError(f"{ratio}: {config.model} does not mix sliding-window and full attention; leave it out")
    page_bytes = [config.page_size * size for size in position_bytes]
    wanted = config.max_num_seqs * -(-max_positions // config.page_size)
    if not any(page_bytes):
        wanted = min(wanted, max(_EMPTY_PAGES, max_request_pages(max_positions, config.page_size, None)))
    if config.num_pages is not None:
        return _pages_of_groups(config, groups, config.num_pages, max_positions, step_tokens)
    if config.kv_cache_memory_bytes < sum(page_bytes):
        raise ConfigError(
            f"kv_cache_memory_bytes={config.kv_cache_memory_bytes}: must hold at least one page of "
            f"{sum(page_bytes)} bytes"
        )

    def fits(first: int) -> bool:
        pages = _pages_of_groups(config, groups, first, max_positions, step_tokens)
        return sum(count * size for count, size in zip(pages, page_bytes, strict=True)) <= config.kv_cache_memory_bytes

    most = bisect.bisect_left(range(1, wanted + 1), True, key=lambda first: not fits(first))
    return _pages_of_groups(config, groups, most or 1, max_positions, step_tokens)


def _pages_of_groups(
    config: EngineConfig, groups: Sequence[LayerGroup], first: int, max_positions: int, step_tokens: int
) -> tuple[int, ...]:
    """Pages of each group if the first one has ``first``."""
    pages = [first]
    for group in groups[1:]:
        least = max_request_pages(max_positions, config.page_size, group.window)
        enough = config.max_num_seqs * least + -(-step_tokens // config.page_size)
        if config.swa_full_tokens_ratio is not None:
            enough = int(first * config.swa_full_tokens_ratio)
        pages.append(min(first, max(least, enough)))
    return tuple(pages)
