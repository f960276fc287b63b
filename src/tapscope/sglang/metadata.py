"""Metadata that SGLang's dumper stores with a value: the tags in the file name, and ``meta``."""

from collections.abc import Iterable, Mapping
from typing import Any

from tapscope.run_format.manifest import MAX_RANKS
from tapscope.run_format.record import BACKWARD, FORWARD, RECOMPUTE
from tapscope.sglang.filenames import GRAD

_ABOUT: tuple[str, ...] = (
    "name",
    "step",
    "rank",
    "dump_index",
    "recompute_status",
    "layer_id",
    "dims",
    "dims_grad",
    "tokenizer_path",
)
_ABOUT += ("world_rank", "world_size", "recompute_pseudo_rank", "recompute_pseudo_size", "filename")
_SCALARS = (str, int, float, bool)
_FRAMEWORKS = ("sglang", "megatron")


def parallel_info(meta: Mapping[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    """Return (axis -> size, axis -> coordinate) of axes with more than one rank, from the parallel info in ``meta``."""
    sizes: dict[str, int] = {}
    coords: dict[str, int] = {}
    for framework in _FRAMEWORKS:
        info: Any = meta.get(f"{framework}_parallel_info")
        for name, value in info.items() if isinstance(info, dict) else ():
            axis, size = str(name).removesuffix("_size"), number(value)
            coordinate = number(info.get(f"{axis}_rank"))
            if str(name).endswith("_size") and size and 1 < size <= MAX_RANKS and coordinate is not None:
                sizes[axis], coords[axis] = size, coordinate
    return sizes, coords


def _is_placed(info: Any) -> bool:
    """Return whether the parallel info is valid: a framework without initialized groups reports sizes of 0 or an
    error."""
    return isinstance(info, dict) and any(str(k).endswith("_size") and (number(v) or 0) > 0 for k, v in info.items())


def framework_of(metas: Iterable[Mapping[str, Any]]) -> str:
    """Return the framework whose process groups the ranks used; ``sglang`` if unknown."""
    known = {each for meta in metas for each in _FRAMEWORKS if _is_placed(meta.get(f"{each}_parallel_info"))}
    return next((each for each in _FRAMEWORKS if each in known), "sglang")


def pass_of(name: str, tags: Mapping[str, Any]) -> str:
    """Return the pass of a record: forward, recompute or backward."""
    if name.startswith(GRAD):
        return BACKWARD
    return RECOMPUTE if tags.get("recompute_status") == "recompute" else FORWARD


def scalars_of(meta: Any) -> dict[str, Any]:
    """Return the strings, numbers and flat dicts of ``meta``; other values are dropped, including malicious
    containers."""
    if not isinstance(meta, dict):
        return {}
    kept: dict[str, Any] = {}
    for name, value in meta.items():
        if isinstance(value, dict):
            kept[str(name)] = {str(key): each for key, each in value.items() if isinstance(each, _SCALARS)}
        elif isinstance(value, _SCALARS):
            kept[str(name)] = value
    return kept


def own_tags(tags: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the tags added by the caller of ``dump()``, without the standard tags; None if there are none."""
    kept = {
        str(name): value
        for name, value in tags.items()
        if name not in _ABOUT and not str(name).endswith("_parallel_info") and isinstance(value, _SCALARS)
    }
    return kept or None


def number(value: Any) -> int | None:
    """Parse a non-negative integer from metadata or a file name; None for anything else."""
    if isinstance(value, str) and value.isdecimal() and len(value) < 19:
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62 else None
