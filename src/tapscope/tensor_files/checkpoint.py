"""Checkpoint: the weights of a Hugging Face checkpoint as a run with one step of parameters.

Each tensor is a site ``PATH:param[weight]``, independent of its shard. Checkpoints are therefore compared by name and
by the name maps of :mod:`tapscope.comparator.matching`, including fused projections. ``config.json`` provides the
hyperparameters. A shard or tensor listed in the index but missing is reported as a problem of the run.
"""

import json
from pathlib import Path
from typing import Any

from tapscope.core.errors import RunCorruptError
from tapscope.core.formatting import listed
from tapscope.core.regular_files import read_small
from tapscope.run_format.index import Event, RankIndex, SiteInfo
from tapscope.run_format.manifest import CHECKPOINT_FORMAT
from tapscope.run_format.record import FORWARD, Entry, Key, Record
from tapscope.run_format.tensor_layout import Tensor
from tapscope.sglang.filenames import clean_part
from tapscope.tensor_files.directory import FilePayloads, TensorDirectory, natural_order
from tapscope.tensor_files.tensor_file import read_tensor_file

CONFIG = "config.json"
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_WHOLE = ("model.safetensors", "pytorch_model.bin")
_MAX_JSON = 64 << 20
_MAX_NAMED = 5
"""Maximum number of missing tensors named in the message."""


def is_checkpoint(folder: Path) -> bool:
    """Return whether the directory has the layout in which transformers saves a model."""
    if any((folder / name).is_file() for name in (*INDEXES, _WHOLE[0])):
        return True
    has_weights = (folder / _WHOLE[1]).is_file() or next(folder.glob("*.safetensors"), None) is not None
    return (folder / CONFIG).is_file() and has_weights


def read_checkpoint(folder: Path) -> TensorDirectory:
    """Read the headers of all shards; payloads are read on access. Raises RunCorruptError if no shard is readable."""
    weight_map = _weight_map(folder)
    shards = sorted(set(weight_map.values())) if weight_map else _shards(folder)
    index, payloads = RankIndex(), FilePayloads(folder)
    tensors: dict[str, tuple[str, Tensor]] = {}
    for shard in shards:
        try:
            content, _ = read_tensor_file(folder / shard)
            if not isinstance(content, dict):
                raise RunCorruptError(f"{folder / shard}: is not a state dict")
            for name, tensor in content.items():
                if isinstance(tensor, Tensor) and weight_map.get(str(name), shard) == shard:
                    tensors[str(name)] = shard, tensor
        except RunCorruptError as error:
            index.problems.append(str(error))
            payloads.damaged.append(str(error))
    missing = [name for name, shard in weight_map.items() if name not in tensors and (folder / shard).is_file()]
    if missing:
        names = listed(missing, _MAX_NAMED)
        index.problems.append(f"{folder}: the index names tensors that no shard has: {names}")
    if not tensors:
        raise RunCorruptError(f"{folder}: no readable weights: {(index.problems or ['its files have no tensor'])[0]}")
    config = _json(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    text_config = {**config, **text} if isinstance(text := config.get("text_config"), dict) else config
    if text_config.get("tie_word_embeddings") is True and "lm_head.weight" not in tensors:
        tied = next((name for name in tensors if name.endswith("embed_tokens.weight")), None)
        if tied is not None:  # to match the head of a checkpoint that stores both
            tensors["lm_head.weight"] = tensors[tied]
    for name in sorted(tensors, key=_module_order):
        shard, tensor = tensors[name]
        add_weight(index, payloads, name, shard, tensor)
    index.add_step(0, len(index.records))
    index.events = [Event(0, "open", {}), Event(0, "close", {})]
    quantization = config.get("quantization_config")
    manifest = checkpoint_manifest(
        "checkpoint",
        folder.resolve().name,
        dtype=next((value for key in ("dtype", "torch_dtype") if isinstance(value := text_config.get(key), str)), ""),
        model_config={key: value for key, value in text_config.items() if type(value) in (int, float)},
        weight_block_size=_block(quantization),
        quantization=quantization if isinstance(quantization, dict) else {},
    )
    return TensorDirectory(manifest, {0: index}, payloads)


def checkpoint_manifest(framework: str, model: str, **known: Any) -> dict[str, Any]:
    """Return the manifest of a checkpoint as a run; ``known`` overrides its default fields."""
    manifest = {"version": 1, "format": CHECKPOINT_FORMAT, "framework": framework, "model": model, "dtype": ""}
    return manifest | {"mesh": {}, "world_size": 1, "model_config": {}, "weight_block_size": None} | known


def site_of_weight(name: str) -> str:
    """Return the site of a parameter: ``model.layers.0.mlp.up_proj:param[weight]`` for
    ``model.layers.0.mlp.up_proj.weight``."""
    path, _, last = name.rpartition(".")
    return f"{clean_part(path) if path else ''}:param[{clean_part(last)}]"


def add_weight(
    index: RankIndex,
    payloads: FilePayloads,
    name: str,
    file: str,
    tensor: Tensor,
    *,
    rank: int = 0,
    dims: str | None = None,
) -> None:
    """Add the record and the site of a tensor stored in ``file``; ``name`` is the name of the parameter."""
    site, seq = site_of_weight(name), len(index.records)
    entry = Entry(file, tensor.offset, tensor.nbytes)
    index.records.append(Record(Key(site, 0, rank, 0, 0, FORWARD), seq, tensor.dtype, tensor.shape, dims, entry=entry))
    if not tensor.is_contiguous:
        payloads.non_contiguous[rank, seq] = tensor
    index.sites[site] = SiteInfo(site, "", {}, dims=dims)


def _module_order(name: str) -> tuple[Any, ...]:
    """Return a sort key in forward order: embeddings, layers by number, other parameters."""
    place = 0 if "embed" in name or ".wte." in f".{name}" else 2
    if any(part.isdecimal() for part in name.split(".")):
        place = 1
    return place, *natural_order(name)


def _weight_map(folder: Path) -> dict[str, str]:
    """Return tensor -> shard from the index file; empty without an index. Raises RunCorruptError for an invalid
    index."""
    path = next((folder / name for name in INDEXES if (folder / name).is_file()), None)
    if path is None:
        return {}
    weight_map = _json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise RunCorruptError(f"{path}: weight_map must be an object of tensor names and file names")
    for shard in set(weight_map.values()):
        if shard != Path(shard).name or not shard.endswith((".safetensors", ".bin")):
            raise RunCorruptError(f"{path}: invalid file name {shard[:80]!r}")
    return weight_map


def _shards(folder: Path) -> list[str]:
    if (folder / _WHOLE[0]).is_file():
        return [_WHOLE[0]]
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    return names or [_WHOLE[1]]


def _block(quantization: Any) -> tuple[int, int] | None:
    """Return (rows, columns) that share a scale, or None."""
    block = quantization.get("weight_block_size") if isinstance(quantization, dict) else None
    if isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block):
        return block[0], block[1]
    return None


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_small(path, _MAX_JSON))
    except (OSError, ValueError, RecursionError) as error:
        raise RunCorruptError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not isinstance(content, dict):
        raise RunCorruptError(f"{path}: must be a JSON object")
    return content
