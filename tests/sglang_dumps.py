"""Directories as SGLang's dumper writes them, made by torch.save; no test in here."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch


class SglangDump:
    """Writes what the dumpers of all ranks of one job would, in one process::

    dump = SglangDump(tmp_path / "dump", tp=2)
    dump.step(input_ids=[3, 4, 5], positions=[0, 1, 2], seq_lens=[3], rids=["a"])
    dump.hook("model.layers.0.mlp", output={0: left, 1: right}, layer_id=0)
    dump.dump("q", tensor, dims="t h")
    """

    def __init__(self, folder: Path, *, tp: int = 1, framework: str = "sglang") -> None:
        self.folder, self.tp, self.framework = folder, tp, framework
        self.number = -1
        self._index = dict.fromkeys(range(tp), 0)
        folder.mkdir(parents=True)

    def step(self, **arguments: Any) -> None:
        """Begin the next step, with the arguments of the model that every rank dumps under their own names."""
        self.number += 1
        for name, value in arguments.items():
            is_text = isinstance(value, list) and value and isinstance(value[0], str)
            self.dump(name, value if is_text or isinstance(value, str) else torch.as_tensor(value))

    def hook(self, module: str, *, inputs: Mapping[str, Any] | None = None, output: Any = None, **tags: Any) -> None:
        """What the hooks at one module dump; a dict with ranks as keys gives each its own tensor."""
        for key, value in (inputs or {}).items():
            self.dump(".".join(part for part in (f"non_intrusive__{module}", "inputs", key) if part), value, **tags)
        if output is not None:
            self.dump(f"non_intrusive__{module}.output" if module else "non_intrusive__output", output, **tags)

    def dump(self, name: str, value: Any, *, dims: str | None = None, **tags: Any) -> None:
        """One value, on every rank, or with ranks as keys on those."""
        by_rank = value if isinstance(value, dict) and set(value) <= set(range(self.tp)) and value else None
        for rank in by_rank or range(self.tp):
            self._write(rank, name, by_rank[rank] if by_rank else value, dims, tags)

    def _write(self, rank: int, name: str, value: Any, dims: str | None, tags: dict[str, Any]) -> None:
        self._index[rank] += 1
        said = {"step": self.number, "rank": rank, "dump_index": self._index[rank], "name": name}
        said |= {"recompute_status": "disabled", **tags}
        meta = said | {"world_rank": rank, "world_size": self.tp, "tokenizer_path": "org/tiny"}
        meta[f"{self.framework}_parallel_info"] = {
            f"{axis}_{what}": number
            for axis, place, size in (
                ("tp", rank, self.tp),
                ("attn_tp", rank, self.tp),
                ("pp", 0, 1),
                ("attn_dp", 0, 1),
            )
            for what, number in (("rank", place), ("size", size))
        }
        if dims is not None:
            meta["dims"] = dims
        file = self.folder / ("___".join(f"{k}={v}" for k, v in said.items()) + ".pt")
        torch.save({"value": value, "meta": meta}, file)
