"""Scales of an FP8 KV cache from a JSON file, for checkpoints that have none: SGLang's `--quantization-param-path`.

    {"model_type": "llama", "kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {"0": 0.02, "1": 0.03}}}}

`scaling_factor` maps each tensor-parallel rank and layer to the scale of both its keys and its values
(https://docs.sglang.ai, "Quantized KV Cache").
"""

from pathlib import Path

from tapscope.core.errors import CheckpointError
from tapscope.core.formatting import short
from tapscope.engine.hf_config.config_reader import ConfigReader
from tapscope.engine.params.validators import is_number


def read_scale_file(path: Path, num_layers: int, rank: int, tp: int) -> dict[int, tuple[float, float]]:
    """Layer -> scales of keys and of values on ``rank`` of ``tp``; a file may hold one set, "0", for all ranks.

    Raises CheckpointError naming the file, the rank and the layer at fault.
    """
    if not path.is_file():
        raise CheckpointError(f"quantization_param_path {path} is not a file")
    section = ConfigReader.open(path).section("kv_cache")
    by_rank = None if section is None else section.section("scaling_factor")
    if section is None or by_rank is None:
        raise CheckpointError(f"{path} has no kv_cache.scaling_factor, which maps ranks and layers to scales")
    section.choice("dtype", ("float8_e4m3fn", "fp8", "fp8_e4m3"), "float8_e4m3fn")
    ranks = sorted(by_rank.values)
    if ranks not in (["0"], sorted(map(str, range(tp)))):
        raise CheckpointError(
            f"{path}: scaling_factor is for ranks {', '.join(ranks)}; it must be for 0, or 0 to {tp - 1}"
        )
    name = str(rank) if len(ranks) > 1 else "0"
    layers = by_rank.section(name)
    wanted = [str(layer) for layer in range(num_layers)]
    if layers is None or set(layers.values) != set(wanted):
        raise CheckpointError(
            f"{path}: scaling_factor of rank {name} must have layers 0 to {num_layers - 1}, and only these"
        )
    for layer in wanted:
        scale = layers.values[layer]
        if not is_number(scale) or scale <= 0:
            found = f"{path}: the scale of rank {name}, layer {layer} is {short(scale)}"
            raise CheckpointError(f"{found}; it must be a finite number above 0")
    return {int(layer): (float(layers.values[layer]),) * 2 for layer in wanted}
