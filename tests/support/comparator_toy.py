"""A small decoder in numpy that writes runs: packed or padded, unsharded or sharded, in fp32 or rounded to bf16.

It replaces a model where only the comparator is under test; contains no tests.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from factories import RunFactory

from tapscope.core.observe import RowSpan
from tapscope.run_format.run import Run
from tapscope.run_format.segment import SEGMENT_BYTES
from tapscope.sources import open_run

Array = np.ndarray[Any, Any]
HIDDEN, INNER, HEADS, VOCAB, LAYERS = 64, 160, 4, 97, 4
TOP = 2
"""Experts per token."""
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def weights(seed: int = 0, layers: int = LAYERS, experts: int = 0) -> dict[str, Array]:
    """Return path -> [out, in] float32, with Hugging Face names without `.weight`.

    With ``experts``, every MLP is a router and that many experts, in one [experts, out, in] matrix.
    """
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> Array:
        return (rng.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)

    found = {"model.embed_tokens": rng.standard_normal((VOCAB, HIDDEN)).astype(np.float32)}
    for i in range(layers):
        layer = f"model.layers.{i}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            found[f"{layer}.self_attn.{name}"] = matrix(HIDDEN, HIDDEN)
        if experts:
            found[f"{layer}.mlp.gate"] = matrix(experts, HIDDEN)
            found[f"{layer}.mlp.experts"] = np.stack([matrix(HIDDEN, HIDDEN) for _ in range(experts)])
        else:
            found[f"{layer}.mlp.gate_proj"] = matrix(INNER, HIDDEN)
            found[f"{layer}.mlp.up_proj"] = matrix(INNER, HIDDEN)
            found[f"{layer}.mlp.down_proj"] = matrix(HIDDEN, INNER)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"{layer}.{norm}"] = (1 + 0.2 * rng.standard_normal(HIDDEN)).astype(np.float32)
    found["model.norm"] = np.ones(HIDDEN, np.float32)
    found["lm_head"] = matrix(VOCAB, HIDDEN)
    return found


@dataclass
class Toy:
    """Runs the decoder over full prompts and records every site of every step."""

    tables: Mapping[str, Array]
    dtype: str = "float32"
    tp: int = 1
    spread: int = 0
    """Number of ranks that record shards of the computation of one rank; 0: the computing ranks record."""
    segment_bytes: int = SEGMENT_BYTES
    padded: bool = False
    annotate: bool = True
    inputs: bool = True
    prefix: str = ""
    hooks: Mapping[str, Callable[[Array], Array]] = field(default_factory=dict)
    """Site -> function that applies a bug to the value, [tokens, width]."""
    alone: str = ""
    """Path of a row-parallel layer without all-reduce: the partial sum of rank 0 is propagated."""

    def write(self, path: Path, prompts: Mapping[str, Sequence[int]], *, steps: Sequence[int] = ()) -> Run:
        """Write one step, or with ``steps`` the prompts cut at these positions: prefill, then chunks."""
        layers = sum(name.endswith("input_layernorm") for name in self.tables)
        mesh = {"tp": self.ranks} if self.ranks > 1 else {}
        how = {"framework": "toy", "dtype": self.dtype, "segment_bytes": self.segment_bytes}
        with RunFactory(path, mesh=mesh, **how) as run:
            cuts = [0, *steps, max(map(len, prompts.values()))]
            history: dict[str, list[tuple[Array, Array]]] = {}
            for first, last in pairwise(cuts):
                part = {name: list(ids[first:last]) for name, ids in prompts.items() if len(ids) > first}
                _Pass(self, run, part, first, history, layers).run()
        return open_run(path)

    @property
    def ranks(self) -> int:
        """Number of recording ranks."""
        return self.spread or self.tp


class _Pass:
    """One step of the decoder."""

    def __init__(
        self, toy: Toy, run: RunFactory, part: dict[str, list[int]], first: int, history: Any, layers: int
    ) -> None:
        self.toy, self.out, self.part, self.first, self.history, self.layers = toy, run, part, first, history, layers
        self.length = max(map(len, part.values()))
        slot, self.spans, rows = 0, {}, []
        for i, (name, ids) in enumerate(part.items()):
            start = i * self.length if toy.padded else slot
            rows.append(RowSpan(name, first, len(ids), 0, start))
            self.spans[name] = slice(slot, slot + len(ids))
            slot += len(ids)
        grid = (len(part), self.length) if toy.padded else (slot,)
        run.step(grid=grid, rows=rows, token_ids=[t for ids in part.values() for t in ids])

    def run(self) -> None:
        ids = np.array([t for part in self.part.values() for t in part])
        if self.first == 0:
            self.out.site(f"{self.toy.prefix}:in[input_ids]", "ToyForCausalLM")
        self.put(":in[input_ids]", ids, "t")
        self.put("model.embed_tokens:in[input]", ids, "t")
        table = self.round(self.toy.tables["model.embed_tokens"])
        if self.first == 0:
            self.out.site(f"{self.toy.prefix}model.embed_tokens:out", "Embedding", {"weight": table.shape})
        hidden = self.put("model.embed_tokens:out", table[ids], "t h")
        for i in range(self.layers):
            hidden = self.layer(f"model.layers.{i}", hidden)
        hidden = self.norm("model.norm", hidden)
        logits = self.linear("lm_head", hidden, "t h[tp]")
        self.put(":out[logits]", logits, "t h")

    def layer(self, path: str, hidden: Array) -> Array:
        if self.toy.inputs:
            self.put(f"{path}:in[hidden_states]", hidden, "t h")
        x = self.norm(f"{path}.input_layernorm", hidden)
        q, k, v = (self.linear(f"{path}.self_attn.{n}", x, "t h[tp]") for n in ("q_proj", "k_proj", "v_proj"))
        mixed = self.hooked(f"{path}.self_attn", self.round(self.attention(path, q, k, v)))
        out = self.row_linear(f"{path}.self_attn.o_proj", mixed)
        self.put(f"{path}.self_attn:out[0]", out, "t h")
        hidden = self.round(hidden + out)
        x = self.norm(f"{path}.post_attention_layernorm", hidden)
        out = self.experts(f"{path}.mlp", x) if f"{path}.mlp.gate" in self.toy.tables else self.mlp(f"{path}.mlp", x)
        self.put(f"{path}.mlp:out", out, "t h")
        return self.put(f"{path}:out", self.round(hidden + out), "t h")

    def mlp(self, path: str, x: Array) -> Array:
        gate, up = (self.linear(f"{path}.{n}", x, "t h[tp]") for n in ("gate_proj", "up_proj"))
        act = self.put(f"{path}.act_fn:out", self.round(gate / (1 + np.exp(-gate))), "t h[tp]")
        return self.row_linear(f"{path}.down_proj", self.round(act * up))

    def experts(self, path: str, x: Array) -> Array:
        """Compute all experts on every rank: the best ``TOP`` of the router's scores, weighted by their softmax."""
        self.put(f"{path}:in[hidden_states]", x, "t h")
        router = self.round(self.toy.tables[f"{path}.gate"])
        self.put(f"{path}.gate:in[hidden_states]", x, "t h")
        scores = self.put(f"{path}.gate:out[0]", self.round(x @ router.T), "t e", router)
        chosen = np.argsort(-scores, axis=1, kind="stable")[:, :TOP]
        best = np.take_along_axis(scores, chosen, axis=1)
        shares = np.exp(best - best.max(-1, keepdims=True))
        shares = self.put(f"{path}.gate:out[1]", self.round(shares / shares.sum(-1, keepdims=True)), "t k")
        self.put(f"{path}.gate:out[2]", chosen, "t k")
        self.put(f"{path}.experts:in[hidden_states]", x, "t h")
        given = np.einsum("th,tkoh->tko", x, self.round(self.toy.tables[f"{path}.experts"])[chosen])
        mixed = np.einsum("tko,tk->to", self.round(given), shares)
        return self.put(f"{path}.experts:out", self.round(mixed), "t h")

    def attention(self, path: str, q: Array, k: Array, v: Array) -> Array:
        out = np.empty_like(q)
        for name, span in self.spans.items():
            past = self.history.setdefault(f"{path}/{name}", [])
            past.append((k[span], v[span]))
            keys, values = (
                np.concatenate(side).reshape(-1, HEADS, HIDDEN // HEADS) for side in zip(*past, strict=True)
            )
            query = q[span].reshape(-1, HEADS, HIDDEN // HEADS)
            scores = np.einsum("qhd,khd->hqk", query, keys) / np.sqrt(HIDDEN // HEADS)
            seen = np.arange(len(keys))[None, :] <= (len(keys) - len(query) + np.arange(len(query)))[:, None]
            scores = np.where(seen, scores, -np.inf)
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            scores /= scores.sum(-1, keepdims=True)
            out[span] = np.einsum("hqk,khd->qhd", scores, values).reshape(len(query), HIDDEN)
        return out.astype(np.float32)

    def norm(self, path: str, x: Array) -> Array:
        if self.toy.inputs:
            self.put(f"{path}:in[hidden_states]", x, "t h")
        scaled = self.round(x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6))
        return self.put(
            f"{path}:out", self.round(scaled * self.round(self.toy.tables[path])), "t h", self.toy.tables[path]
        )

    def linear(self, path: str, x: Array, dims: str) -> Array:
        if self.toy.inputs:
            self.put(f"{path}:in[input]", x, "t h")
        weight = self.round(self.toy.tables[path])
        return self.put(f"{path}:out", self.round(x @ weight.T), dims, weight)

    def row_linear(self, path: str, x: Array) -> Array:
        if self.toy.inputs:
            self.put(f"{path}:in[input]", x, "t h[tp]")
        weight, tp = self.round(self.toy.tables[path]), self.toy.tp
        if tp == 1:
            return self.put(f"{path}:out", self.round(x @ weight.T), "t h", weight)
        summands = [
            self.hooked(f"{path}.partial:out", self.round(a @ w.T))
            for a, w in zip(np.split(x, tp, axis=1), np.split(weight, tp, axis=1), strict=True)
        ]
        self.write(f"{path}.partial:out", summands, "t h[tp:partial]", None)
        if self.toy.alone == path:
            self.write(f"{path}:out", summands, "t h # tp:replicated", weight)
            return summands[0]
        return self.put(f"{path}:out", self.round(sum(summands)), "t h", weight)

    def round(self, x: Array) -> Array:
        x = x.astype(np.float32)
        return x.astype(ml_dtypes.bfloat16).astype(np.float32) if self.toy.dtype == "bfloat16" else x

    def hooked(self, site: str, value: Array) -> Array:
        hook = self.toy.hooks.get(site)
        return value if hook is None else self.round(hook(value.copy()))

    def put(self, site: str, value: Array, dims: str, weight: Array | None = None) -> Array:
        value = self.hooked(site, value) if value.dtype.kind == "f" else value
        tp = self.toy.ranks
        sharded = "[tp]" in dims and tp > 1
        parts = np.array_split(value, tp, axis=1) if sharded else [value] * tp
        text = dims if sharded or tp == 1 else f"{dims} # tp:replicated"
        self.write(site, parts, text.replace("[tp]", "") if tp == 1 else text, weight)
        return value

    def write(self, site: str, parts: Sequence[Array], dims: str, weight: Array | None) -> None:
        name = self.toy.prefix + site if self.toy.prefix and site.startswith("model.") else site
        if weight is not None and self.first == 0:
            self.out.site(name, params={"weight": weight.shape})
        arrays = {rank: self.laid_out(part) for rank, part in enumerate(parts)}
        text = dims.replace("t", "b s", 1) if self.toy.padded else dims
        self.out.put(name, arrays, dims=text if self.toy.annotate or self.toy.ranks > 1 else None)

    def laid_out(self, value: Array) -> Array:
        """Return packed rows unchanged, or laid out as [batch, sequence] with garbage in the padding."""
        if value.dtype.kind == "f" and self.toy.dtype == "bfloat16":
            value = value.astype(ml_dtypes.bfloat16)
        if not self.toy.padded:
            return value
        grid = np.full((len(self.part), self.length, *value.shape[1:]), 7, value.dtype)
        for i, span in enumerate(self.spans.values()):
            grid[i, : span.stop - span.start] = value[span]
        return grid


def prompts(lengths: Sequence[int] = (23, 9, 31), seed: int = 5) -> dict[str, list[int]]:
    """Return request -> tokens."""
    rng = np.random.default_rng(seed)
    return {str(i): rng.integers(0, VOCAB, n).tolist() for i, n in enumerate(lengths)}


def damaged(tables: Mapping[str, Array], path: str, how: str) -> dict[str, Array]:
    """Return the weights with one of them damaged: ``noise`` of 8 %, one ``zeroed`` row, or ``scaled`` by 1.03."""
    changed = dict(tables)
    weight = tables[path].copy()
    if how == "noise":
        weight += 0.08 * weight.std() * np.random.default_rng(9).standard_normal(weight.shape).astype(np.float32)
    elif how == "zeroed":
        weight[len(weight) // 2] = 0
    else:
        weight *= 1.03
    changed[path] = weight
    return changed
