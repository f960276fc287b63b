"""Directories in the format of SGLang's dumper, written by torch.save; contains no tests."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
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

    def __init__(self, folder: Path, *, tp: int = 1, dp: int = 1, framework: str = "sglang") -> None:
        """Create the directory; ``dp`` is the number of groups of adjacent ranks with data-parallel attention."""
        self.folder, self.tp, self.dp, self.framework = folder, tp, dp, framework
        self.number = -1
        self._index = dict.fromkeys(range(tp), 0)
        folder.mkdir(parents=True)

    def step(self, **arguments: Any) -> None:
        """Begin the next step, with the model arguments that every rank dumps under their own names."""
        self.number += 1
        for name, value in arguments.items():
            is_text = isinstance(value, list) and value and isinstance(value[0], str)
            self.dump(name, value if is_text or isinstance(value, str | dict) else torch.as_tensor(value))

    def hook(self, module: str, *, inputs: Mapping[str, Any] | None = None, output: Any = None, **tags: Any) -> None:
        """Dump the values of one module's hooks; a dict keyed by rank gives each rank its own tensor."""
        for key, value in (inputs or {}).items():
            self.dump(".".join(part for part in (f"non_intrusive__{module}", "inputs", key) if part), value, **tags)
        if output is not None:
            self.dump(f"non_intrusive__{module}.output" if module else "non_intrusive__output", output, **tags)

    def dump(self, name: str, value: Any, *, dims: str | None = None, **tags: Any) -> None:
        """Dump one value on every rank; a dict keyed by rank gives each rank its own value."""
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
                ("attn_tp", rank % (self.tp // self.dp), self.tp // self.dp),
                ("pp", 0, 1),
                ("attn_dp", rank // (self.tp // self.dp), self.dp),
            )
            for what, number in (("rank", place), ("size", size))
        }
        if dims is not None:
            meta["dims"] = dims
        file = self.folder / ("___".join(f"{k}={v}" for k, v in said.items()) + ".pt")
        torch.save({"value": value, "meta": meta}, file)


Bug = Callable[[str, torch.Tensor], torch.Tensor]


def serve_llama(
    model: Any,
    folder: Path,
    prompts: Mapping[str, Sequence[int]],
    *,
    tp: int = 1,
    cuts: Sequence[int] = (),
    annotate: bool = True,
    bug: Bug = lambda name, value: value,
    **arguments: Any,
) -> Path:
    """Write the dump of SGLang serving ``prompts``: packed rows, fused projections, shards of ``tp`` ranks.

    The values come from the Hugging Face ``model``; ``cuts`` are positions at which every prompt is cut into steps, so
    that the last ones may be single tokens, as in decode. ``bug`` changes a value, given its name, before it is cut.
    """
    dump = SglangDump(folder, tp=tp)
    taken = {name: _forward(model, ids) for name, ids in prompts.items()}
    for first, last in pairwise([0, *cuts, max(map(len, prompts.values()))]):
        part = {name: range(first, min(last, len(ids))) for name, ids in prompts.items() if len(ids) > first}
        dump.step(
            input_ids=[prompts[name][i] for name, rows in part.items() for i in rows],
            positions=[i for rows in part.values() for i in rows],
            seq_lens=[rows.stop for rows in part.values()],
            rids=[f"rid-{name}" for name in part],
            **arguments,
        )
        packed = {
            site: bug(site, torch.cat([taken[name][site][rows.start : rows.stop] for name, rows in part.items()]))
            for site in next(iter(taken.values()))
        }
        _dump_forward(dump, packed, model.config, annotate)
    return folder


def _forward(model: Any, ids: Sequence[int]) -> dict[str, torch.Tensor]:
    """Return module path -> output, [tokens, width]."""
    found: dict[str, torch.Tensor] = {}

    def keep(path: str) -> Any:
        def hook(module: Any, args: Any, output: Any) -> None:
            value = output[0] if isinstance(output, tuple) else output
            if isinstance(value, torch.Tensor):
                found[path] = value[0].detach().clone()

        return hook

    handles = [module.register_forward_hook(keep(path)) for path, module in model.named_modules() if path]
    with torch.no_grad():
        model(input_ids=torch.tensor([list(ids)]))
    for handle in handles:
        handle.remove()
    return found


def _dump_forward(dump: SglangDump, values: Mapping[str, torch.Tensor], config: Any, annotate: bool) -> None:
    whole = "t h # tp:replicated attn_tp:replicated" if annotate else None

    def fused(parts: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        shards = zip(*(part.chunk(dump.tp, dim=-1) for part in parts), strict=True)
        return {rank: torch.cat(shard, dim=-1) for rank, shard in enumerate(shards)}

    dump.hook("model.embed_tokens", output=values["model.embed_tokens"], dims=whole)
    residual = values["model.embed_tokens"]
    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}"
        about = {"layer_id": i, "dims": whole}
        shard = {"layer_id": i}
        dump.hook(f"{layer}.input_layernorm", output=values[f"{layer}.input_layernorm"], **about)
        qkv = [values[f"{layer}.self_attn.{name}_proj"] for name in "qkv"]
        gate_up = [values[f"{layer}.mlp.{name}_proj"] for name in ("gate", "up")]
        sizes = "+".join(f"{name}={part.shape[-1]}" for name, part in zip("qkv", qkv, strict=True))
        dims = f"t ({sizes})[tp]" if annotate else None
        dump.hook(f"{layer}.self_attn.qkv_proj", output=fused(qkv), **shard, dims=dims)
        dump.hook(f"{layer}.self_attn.o_proj", output=values[f"{layer}.self_attn.o_proj"], **about)
        dump.hook(f"{layer}.post_attention_layernorm", output=values[f"{layer}.post_attention_layernorm"], **about)
        dims = "t (gate+up)[tp]" if annotate else None
        dump.hook(f"{layer}.mlp.gate_up_proj", output=fused(gate_up), **shard, dims=dims)
        dump.hook(f"{layer}.mlp.down_proj", output=values[f"{layer}.mlp.down_proj"], **about)
        mlp = values[f"{layer}.mlp.down_proj"]
        dump.hook(f"{layer}.mlp", output=mlp, **about)
        # The layer returns its MLP's output and the residual separately; the next norm adds them.
        residual = values[layer] - mlp
        for number, value in enumerate((mlp, residual)):
            dump.dump(f"non_intrusive__{layer}.output.{number}", value, dims=whole)
    dump.hook("model.norm", output=values["model.norm"], dims=whole)
    dump.hook("", output=None)
    dump.dump("non_intrusive__output.next_token_logits", values["lm_head"][-1:])
