"""Megatron checkpoint: weights saved by Megatron-LM in one file per model-parallel rank, as a run with one step.

The path is ``iter_0000010/mp_rank_TT/model_optim_rng.pt``, with ``mp_rank_TT_PPP`` for pipeline stages and one more
number for expert parallelism. Tensor-parallel shards get the dims of Megatron's parallel layers. They are therefore
assembled and matched like captured parameters: ``linear_qkv`` by query groups, a gated ``linear_fc1`` into gate and up.
Experts are numbered from 0 on each rank, and layers from 0 in each pipeline stage; the comparator numbers both
globally, as for a capture. Layers of virtual stages (``model0``, ``model1``, …) get their global numbers here. The
arguments in the file provide the hyperparameters. Optimizer states are not read.

The file names follow ``megatron.training.checkpointing.get_checkpoint_name``.
"""

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tapscope.core.errors import RunCorruptError
from tapscope.core.regular_files import read_small
from tapscope.run_format.index import Event, RankIndex
from tapscope.run_format.tensor_layout import Tensor
from tapscope.sglang import torch_save_reader
from tapscope.tensor_files.checkpoint import add_weight, checkpoint_manifest
from tapscope.tensor_files.directory import FilePayloads, TensorDirectory

METADATA = ".metadata"
"""File of a distributed checkpoint that lists its tensors and the locations of their chunks."""
_TRACKER = "latest_checkpointed_iteration.txt"
_FILES = ("model_optim_rng.pt", "model_rng.pt")
_RANK = re.compile(r"mp_rank_(\d{2,4})(?:_(\d{3}))?(?:_(\d{3}))?")
_DECODER_LAYER = re.compile(r"^((?:(?!mtp\.)[^.]+\.)*?layers\.)(\d{1,6})(?=\.)")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d{1,6})\.")
_DIMS: dict[str, str] = {
    "word_embeddings.weight": "v[tp] h",
    "output_layer.weight": "v[tp] h",
    "linear_qkv.weight": "qkv[tp] h",
    "linear_qkv.bias": "qkv[tp]",
    "linear_fc1.weight": "FC1[tp] h",
    "linear_fc1.bias": "FC1[tp]",
    "linear_proj.weight": "o h[tp]",
    "linear_fc2.weight": "o f[tp]",
}
"""Last two components of a parameter name -> dims; all other parameters are replicated."""
_NORMS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
"""Norms that Transformer Engine fuses into the following linear layer -> names of separate norm modules."""
_SIZES = {
    "pp": "pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "tp": "tensor_model_parallel_size",
}
_GROUPED = re.compile(r"\.experts\.(linear_fc[12])\.(weight|bias)(\d+)$")
"""Parameters of one expert in a Transformer Engine module that contains all experts of a rank."""
_STACKED = re.compile(r"\.experts\.weight[12]$")
"""Parameters with all experts of a rank in one tensor."""
_MAX_RANKS = 1024
_CONFIG = {
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "kv_channels": "head_dim",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_experts": "num_experts",
    "padded_vocab_size": "vocab_size",
}
"""Megatron argument -> hyperparameter under its Hugging Face name."""


def find_megatron_checkpoint(folder: Path) -> Path | None:
    """Return the directory with the rank files: ``folder`` itself or its latest iteration; None if there are no rank
    files.

    Raises RunCorruptError if the latest iteration is missing.
    """
    if not folder.is_dir():
        return None
    directory = folder
    if (folder / _TRACKER).is_file():
        try:
            text = read_small(folder / _TRACKER, 64).decode("ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise RunCorruptError(f"{folder / _TRACKER}: cannot be read: {error}") from None
        if not (text.isdecimal() or text == "release"):
            raise RunCorruptError(
                f"{folder / _TRACKER}: invalid iteration {text[:40]!r}: expected a number or 'release'"
            )
        directory = folder / (f"iter_{int(text):07d}" if text.isdecimal() else text)
        if not directory.is_dir():
            raise RunCorruptError(f"{folder}: {_TRACKER} names {directory.name}, which is missing")
    if is_distributed(directory):
        return directory
    return directory if any(True for _ in _rank_files(directory)) else None


def is_distributed(folder: Path) -> bool:
    """Return whether ``torch.distributed.checkpoint`` wrote the directory (``--ckpt-format torch_dist``)."""
    return (folder / METADATA).is_file() or next(folder.glob("*.distcp"), None) is not None


def read_megatron_checkpoint(folder: Path) -> TensorDirectory:
    """Read the headers of every rank's file; payloads are read on access.

    An unreadable file is reported as a problem of its rank. Raises RunCorruptError if no file is readable.
    """
    read = [(numbers, file, _content(folder / file)) for numbers, file in _rank_files(folder)]
    has_stages = all(_size(content, _SIZES["ep"]) == 1 or _size(content, _SIZES["pp"]) > 1 for _, _, content in read)
    places = [_place(numbers, has_stages=has_stages) for numbers, _, _ in read]
    files = {place: file for place, (_, file, _) in zip(places, read, strict=True)}
    contents = {place: content for place, (_, _, content) in zip(places, read, strict=True)}
    mesh = {
        axis: max(1 + max(place[i] for place in files), *(_size(one, argument) for one in contents.values()))
        for i, (axis, argument) in enumerate(_SIZES.items())
    }
    world_size = math.prod(mesh.values())
    manifest = checkpoint_manifest("megatron", model_name(folder), mesh=mesh, world_size=world_size)
    payloads, ranks = FilePayloads(folder), dict[int, RankIndex]()
    chunks = {place: _chunks(contents[place], folder / file) for place, file in sorted(files.items())}
    starts = _starts(chunks, mesh["pp"], next(filter(None, map(arguments, contents.values())), {}))
    for place, file in sorted(files.items()):
        rank = (place[0] * mesh["ep"] + place[1]) * mesh["tp"] + place[2]
        index = ranks[rank] = RankIndex()
        try:
            weights = _weights(chunks[place], place[0], starts, folder / file)
            args = arguments(contents[place])
            manifest["model_config"] |= hyperparameters(args)
            if is_tied(args) and mesh["pp"] == 1:
                weights.setdefault("output_layer.weight", weights.get("embedding.word_embeddings.weight"))
            is_gated, are_sharded = has_gate(args), _has_expert_shards(args, mesh, folder / file)
            if mesh["ep"] > 1 and (stacked := next(filter(_STACKED.search, weights), None)):
                raise RunCorruptError(
                    f"{folder / file}: {stacked} holds the experts of one rank in one tensor (legacy grouped GEMM), "
                    "which is not read; save with expert-model-parallel-size 1, or as torch_dist"
                )
            for name, tensor in sorted(weights.items(), key=lambda item: module_order(item[0])):
                if isinstance(tensor, Tensor):
                    num_axes, num_expert_ranks = len(tensor.shape), mesh["ep"]
                    dims = dims_of_parameter(
                        name, num_axes, is_gated, num_expert_ranks=num_expert_ranks, has_expert_shards=are_sharded
                    )
                    add_weight(index, payloads, name, file, tensor, rank=rank, dims=dims)
        except RunCorruptError as error:
            index.problems.append(str(error))
            payloads.damaged.append(str(error))
        coords = dict(zip(_SIZES, place, strict=True))
        index.events = [Event(rank, "open", {"coords": coords, "mesh": mesh}), Event(rank, "close", {})]
        index.add_step(0, len(index.records))
    if not any(index.records for index in ranks.values()):
        raise RunCorruptError(f"{folder}: no readable weights: {(payloads.damaged or ['its files have no tensor'])[0]}")
    absent = [rank for rank in range(world_size) if rank not in ranks]
    if absent:
        tp, others = absent[0] % mesh["tp"], absent[0] // mesh["tp"]
        stage_and_experts = (mesh["pp"], others // mesh["ep"]), (mesh["ep"], others % mesh["ep"])
        name = f"mp_rank_{tp:02d}" + "".join(f"_{number:03d}" for size, number in stage_and_experts if size > 1)
        next(iter(ranks.values())).problems.append(f"{folder}: {name} is missing, and with it its shards")
    return TensorDirectory(manifest, ranks, payloads)


def arguments(content: Any) -> dict[str, Any]:
    """Return the Megatron-LM arguments stored in a file; empty if there are none."""
    args = content.get("args") if isinstance(content, dict) else None
    return args if isinstance(args, dict) else {}


def hyperparameters(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numeric hyperparameters in ``args`` under their Hugging Face names."""
    return {name: value for key, name in _CONFIG.items() if type(value := args.get(key)) in (int, float)}


def is_tied(args: Mapping[str, Any]) -> bool:
    """Return whether the output layer shares the embedding's weight."""
    return args.get("untie_embeddings_and_output_weights") is False


def has_gate(args: Mapping[str, Any]) -> bool:
    """Return whether ``linear_fc1`` fuses a gate and an up projection."""
    return args.get("swiglu") is True or args.get("gated_linear_unit") is True


def model_name(folder: Path) -> str:
    """Return the name of the checkpoint directory, skipping the directory of an iteration."""
    is_iteration = folder.name == "release" or folder.name.startswith("iter_")
    return (folder.parent if is_iteration else folder).resolve().name


def _content(path: Path) -> Any:
    """Return the contents of a file, or the error."""
    try:
        return torch_save_reader.load(path, is_lenient=True)
    except RunCorruptError as error:
        return error


def _size(content: Any, argument: str) -> int:
    """Return the size of a parallel group according to the arguments in a file; 1 if unknown."""
    size = arguments(content).get(argument)
    return size if type(size) is int and 1 <= size <= _MAX_RANKS else 1


def _place(numbers: tuple[int, ...], *, has_stages: bool) -> tuple[int, int, int]:
    """Return (pipeline stage, expert-parallel rank, tensor-parallel rank) from the numbers in a file name.

    The first number is the tensor-parallel rank. If there are two, the second is the stage if the model ``has_stages``,
    otherwise the expert-parallel rank.
    """
    tp, *others = numbers
    if len(others) == 1 and not has_stages:
        others = [0, *others]
    stage, experts = (*others, 0, 0)[:2]
    return stage, experts, tp


def _rank_files(folder: Path) -> Iterator[tuple[tuple[int, ...], str]]:
    """Yield (numbers in the directory name, relative path) of each rank's file."""
    for inner in sorted(folder.glob("mp_rank_*")):
        match = _RANK.fullmatch(inner.name)
        name = next((name for name in _FILES if (inner / name).is_file()), None)
        if match is not None and name is not None:
            yield tuple(int(number) for number in match.groups() if number is not None), f"{inner.name}/{name}"


def _chunks(content: Any, path: Path) -> list[dict[str, Any]] | RunCorruptError:
    """Return name -> tensor of a rank's model, or of each of its virtual pipeline stages; or the error."""
    if isinstance(content, RunCorruptError):
        return content
    if not isinstance(content, Mapping):
        return RunCorruptError(f"{path}: is not a checkpoint of Megatron-LM")
    names = [name for i in range(len(content)) if (name := f"model{i}") in content] or ["model"]
    models = [content.get(name) for name in names]
    if not all(isinstance(model, dict) for model in models):
        return RunCorruptError(f"{path}: has no model: is not a checkpoint of Megatron-LM")
    return [{plain_name(str(name)): value for name, value in (model or {}).items()} for model in models]


def _starts(
    chunks: Mapping[tuple[int, int, int], list[dict[str, Any]] | RunCorruptError],
    num_stages: int,
    args: Mapping[str, Any],
) -> dict[tuple[int, int], int]:
    """Return (virtual stage, stage) -> global number of its first layer; empty without virtual stages.

    Layers traverse the first virtual stage of all stages, then the second, and so on. The mapping ends where the number
    of layers of a stage is unknown.
    """
    counts: dict[tuple[int, int], int] = {}
    for (stage, _, _), parts in chunks.items():
        for i, part in enumerate([] if isinstance(parts, RunCorruptError) else parts):
            numbers = (int(match[2]) for name in part if (match := _DECODER_LAYER.match(name)))
            counts[i, stage] = max(counts.get((i, stage), 0), *(number + 1 for number in numbers), 0)
    num_virtual = 1 + max((i for i, _ in counts), default=0)
    order = [(i, stage) for i in range(num_virtual) for stage in range(num_stages)]
    share = max(counts.values(), default=0)
    is_even = set(counts.values()) == {share} and share * len(order) == args.get("num_layers")
    starts: dict[tuple[int, int], int] = {}
    first = 0
    for place in order if num_virtual > 1 else ():
        starts[place] = first
        if place not in counts and not is_even:
            break
        first += counts.get(place, share)
    return starts


def _weights(
    chunks: list[dict[str, Any]] | RunCorruptError, stage: int, starts: Mapping[tuple[int, int], int], path: Path
) -> dict[str, Any]:
    """Return name -> tensor of one rank; with virtual stages, layers get their global numbers."""
    if isinstance(chunks, RunCorruptError):
        raise chunks
    if not starts:
        return chunks[0]
    weights: dict[str, Any] = {}
    for i, chunk in enumerate(chunks):
        if (i, stage) not in starts:
            raise RunCorruptError(
                f"{path}: the numbers of its layers (model{i}) depend on the file of an earlier stage, which is missing"
            )
        first = starts[i, stage]
        for local, value in chunk.items():
            layer = _DECODER_LAYER.match(local)
            name = local if layer is None else f"{layer[1]}{int(layer[2]) + first}{local[layer.end() :]}"
            if name in weights and isinstance(value, Tensor):
                raise RunCorruptError(f"{path}: two of its virtual pipeline stages have {name}")
            weights[name] = value
    return weights


def plain_name(name: str) -> str:
    """Return a parameter name without wrappers, with fused norms and grouped experts as separate modules."""
    name = name.removeprefix("module.")
    for inside, own in _NORMS.items():
        name = name.replace(inside, own)
    return _GROUPED.sub(r".experts.local_experts.\3.\1.\2", name)


def _has_expert_shards(args: Mapping[str, Any], mesh: Mapping[str, int], path: Path) -> bool:
    """Return whether tensor-parallel ranks hold shards of an expert, the default unless another size was configured.

    Raises RunCorruptError for unsupported sizes.
    """
    size = args.get("expert_tensor_parallel_size")
    if mesh["tp"] == 1 or type(size) is not int or size == mesh["tp"]:
        return True
    if size > 1 or mesh["ep"] > 1:
        raise RunCorruptError(
            f"{path}: expert-tensor-parallel-size {size} with tensor-model-parallel-size {mesh['tp']} and "
            f"expert-model-parallel-size {mesh['ep']} is not read; save as torch_dist"
        )
    return False


def dims_of_parameter(
    name: str, num_axes: int, is_gated: bool, *, num_expert_ranks: int = 1, has_expert_shards: bool = False
) -> str:
    """Return the dims of a parameter according to Megatron's parallel layers; ``num_axes`` is its number of axes.

    With several expert-parallel ranks, non-expert parameters are replicated over them. Tensor-parallel ranks hold whole
    experts or, with ``has_expert_shards``, shards of experts.
    """
    dims, is_of_expert = _DIMS.get(".".join(name.split(".")[-2:])), ".experts." in name
    copies = ["ep:replicated"] if num_expert_ranks > 1 and not is_of_expert else []
    if dims is not None and (has_expert_shards or not is_of_expert):
        dims = dims.replace("FC1", "(gate+up)" if is_gated else "f")
    else:
        dims, copies = " ".join("abcdefgh"[:num_axes]), ["tp:replicated", *copies]
    return f"{dims} # {' '.join(copies)}".strip() if copies else dims


def module_order(name: str) -> tuple[Any, ...]:
    """Return a sort key in forward order: embeddings, layers by number, other parameters."""
    layer = _LAYER.search(name)
    return (0 if "embedding" in name else 1 if layer else 2, int(layer[1]) if layer else 0)
