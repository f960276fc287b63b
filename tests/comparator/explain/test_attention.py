"""Why an attention differs: recomputed from its queries, keys, values and tables, every planted change is named."""

import math
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from compare_runs import diff
from factories import RunFactory

from tapscope.comparator import compare
from tapscope.comparator.verdict.explanation import Explanation
from tapscope.core.observe import RowSpan
from tapscope.sources import open_run

Array = np.ndarray[Any, Any]
LENGTHS = {"a": 14, "b": 9, "c": 17}
HEADS, GROUPS, DIM = 4, 2, 16
PATH = "model.layers.1.self_attn"


def tables(positions: Array, theta: float = 10000.0) -> tuple[Array, Array]:
    angle = positions[:, None] * theta ** (-np.arange(0, DIM, 2) / DIM)[None, :]
    return np.tile(np.cos(angle), (1, 2)), np.tile(np.sin(angle), (1, 2))


def rotated(x: Array, cos: Array, sin: Array, how: str = "half") -> Array:
    """[n, heads, d], one pair of channels at a time."""
    found = x.copy()
    for i in range(DIM // 2):
        one, two = (i, i + DIM // 2) if how == "half" else (2 * i, 2 * i + 1)
        c, s = cos[:, i][:, None], sin[:, i][:, None]
        found[..., one] = x[..., one] * c - x[..., two] * s
        found[..., two] = x[..., two] * c + x[..., one] * s
    return found


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float = DIM**-0.5,
    sees: Callable[[int, int], bool] = lambda i, j: j <= i,
    head: Callable[[int], int] = lambda h: h // (HEADS // GROUPS),
) -> Array:
    """One request, a row and a head at a time."""
    out = np.zeros((len(q), HEADS, DIM))
    for i in range(len(q)):
        for h in range(HEADS):
            keys = [j for j in range(len(k)) if sees(i, j)]
            scores = [scale * float(q[i, h] @ k[j, head(h)]) for j in keys]
            weights = [math.exp(s - max(scores)) for s in scores] if keys else []
            for weight, j in zip(weights, keys, strict=True):
                out[i, h] += weight / sum(weights) * v[j, head(h)]
    return out.reshape(len(q), -1)


def given(seed: int = 3) -> dict[str, dict[str, Array]]:
    """What each request's attention is given: queries, keys, values."""
    rng = np.random.default_rng(seed)
    found = {}
    for name, count in LENGTHS.items():
        heads = {"q": HEADS, "k": GROUPS, "v": GROUPS}
        found[name] = {
            key: rng.standard_normal((count, n, DIM)).astype(np.float32).astype(np.float64) for key, n in heads.items()
        }
    return found


def why(path: Path, make: Callable[..., Array]) -> Explanation | None:
    """The explanation of two runs, the second of which computes each request by ``make(q, k, v, cos, sin)``."""
    for name, how in (("b", plain), ("t", make)):
        with RunFactory(path / name, model_config={"num_attention_heads": HEADS}) as run:
            rows, slot = [], 0
            for request, count in LENGTHS.items():
                rows.append(RowSpan(request, 0, count, 0, slot))
                slot += count
            run.step(grid=(slot,), rows=rows, token_ids=range(slot))
            parts = list(given().values())
            for port, key in (("q_proj", "q"), ("k_proj", "k"), ("v_proj", "v")):
                flat = np.concatenate([part[key].reshape(len(part[key]), -1) for part in parts])
                run.put(f"{PATH}.{port}:out", flat.astype(np.float32), dims="t h")
            turns = [tables(np.arange(count)) for count in LENGTHS.values()]
            for i in (0, 1):
                table = np.concatenate([one[i] for one in turns]).astype(np.float32)
                run.put(f"{PATH}:in[position_embeddings.{i}]", table, dims="t h")
            made = [how(part["q"], part["k"], part["v"], *turn) for part, turn in zip(parts, turns, strict=True)]
            run.put(f"{PATH}.o_proj:in[input]", np.concatenate(made).astype(np.float32), dims="t h")
    first = diff(path / "b", path / "t").first_divergence
    assert first is not None
    assert first.module == PATH
    return first.explanation


def plain(q: Array, k: Array, v: Array, cos: Array, sin: Array, **how: Any) -> Array:
    return attention(rotated(q, cos, sin), rotated(k, cos, sin), v, **how)


def with_value_lost(q: Array, k: Array, v: Array, cos: Array, sin: Array) -> Array:
    v = v.copy()
    v[2] = 0.0
    return plain(q, k, v, cos, sin)


def with_values(change: Callable[[Array], Array]) -> Callable[..., Array]:
    """Attention reads other values, [n, heads, channels], than were computed."""
    return lambda q, k, v, cos, sin: plain(q, k, change(v), cos, sin)


def with_own_value(change: Callable[[Array], Array]) -> Callable[..., Array]:
    """Every token reads another value of its own alone."""

    def made(q: Array, k: Array, v: Array, cos: Array, sin: Array) -> Array:
        rows = [
            plain(q[: i + 1], k[: i + 1], np.concatenate([v[:i], change(v[i : i + 1])]), cos[: i + 1], sin[: i + 1])[-1]
            for i in range(len(q))
        ]
        return np.stack(rows)

    return made


def with_keys(change: Callable[[Array], Array], *, own: bool = False) -> Callable[..., Array]:
    """Attention reads other keys behind RoPE than were computed; or each token its own alone."""

    def made(q: Array, k: Array, v: Array, cos: Array, sin: Array) -> Array:
        query, key = rotated(q, cos, sin), rotated(k, cos, sin)
        if not own:
            return attention(query, change(key), v)
        rows = [
            attention(query[: i + 1], np.concatenate([key[:i], change(key[i : i + 1])]), v[: i + 1])[-1]
            for i in range(len(q))
        ]
        return np.stack(rows)

    return made


def columns(change: Callable[[Array], Array], *which: int) -> Callable[[Array], Array]:
    """A change of these channels of each head."""

    def changed(v: Array) -> Array:
        out = v.copy()
        out[..., list(which)] = change(v[..., list(which)])
        return out

    return changed


def with_slot(change: Callable[[Array, Array], None]) -> Callable[..., Array]:
    """Attention reads other keys and values behind RoPE in the two longer requests, which ``change`` puts in place."""

    def made(q: Array, k: Array, v: Array, cos: Array, sin: Array) -> Array:
        key, value = rotated(k, cos, sin), v.copy()
        if len(q) > 12:
            change(key, value)
        return attention(rotated(q, cos, sin), key, value)

    return made


def moved(*which: int) -> Callable[[Array, Array], None]:
    """Slot 12 gets the key (0) or value (1) of token 9."""

    def change(*cache: Array) -> None:
        for i in which:
            cache[i][12] = cache[i][9]

    return change


def cleared(key: Array, value: Array) -> None:
    key[9] = value[9] = 0.0


READ = "as attention reads them in target (KV cache)"
PLANTED: dict[str, tuple[Callable[..., Array], str]] = {
    "scale": (lambda *a: plain(*a, scale=1 / DIM), "target scales scores by 0.0625 = 1 / head_dim (16)"),
    "slightly": (lambda *a: plain(*a, scale=0.3), "target scales scores by 0.3, 1.2 × baseline's 0.25"),
    "keys only": (lambda q, k, v, c, s: attention(rotated(q, c, s), k, v), "keys are not rotated in target"),
    "neither": (lambda q, k, v, c, s: attention(q, k, v), "queries and keys are not rotated in target"),
    "pairs": (
        lambda q, k, v, c, s: attention(rotated(q, c, s, "pairs"), rotated(k, c, s, "pairs"), v),
        "target rotates interleaved pairs",
    ),
    "later": (lambda *a: plain(*a, sees=lambda i, j: True), "target's mask is lost: it is not causal"),
    "next": (lambda *a: plain(*a, sees=lambda i, j: j <= i + 1), "a token of target sees the next token too"),
    "window": (lambda *a: plain(*a, sees=lambda i, j: 0 <= i - j < 5), "target sees the last 5 tokens"),
    "first": (lambda *a: plain(*a, sees=lambda i, j: 0 < j <= i or i == 0), "target does not see position 0"),
    "tiled": (lambda *a: plain(*a, head=lambda h: h % GROUPS), "read key and value heads in tiled order"),
    "value": (with_value_lost, "the value of position 2 counts as zero in target"),
    "slot": (with_slot(moved(0, 1)), "the slot of position 12 has the key and value of position 9"),
    "slot's key": (with_slot(moved(0)), "the slot of position 12 has the key of position 9"),
    "slot's value": (with_slot(moved(1)), "the slot of position 12 has the value of position 9"),
    "slot empty": (with_slot(cleared), "the slot of position 9 was not written: its key and value are zero"),
    "slot unread": (
        lambda *a: plain(*a, sees=lambda i, j: j <= i and (j != 9 or len(a[0]) < 12 or i == 9)),
        "the slot of position 9 is not read",
    ),
    "values half": (with_values(lambda v: 0.5 * v), f"values are 0.5 × baseline's {READ}"),
    "values zero": (with_values(columns(lambda v: 0 * v, 4, 5)), f"values are zero in columns 4–5 of each head {READ}"),
    "values clamped": (with_values(lambda v: v.clip(-0.7, 0.7)), f"values are clamped at 0.7 {READ}"),
    "values more": (with_values(columns(lambda v: v + 0.3, 3)), "values are baseline's + 0.3 in column 3 of each head"),
    "values swapped": (
        with_values(columns(lambda v: v[..., ::-1], 2, 9)),
        f"values have column 2 and column 9 swapped {READ}",
    ),
    "values rounded": (
        with_values(lambda v: v.astype(ml_dtypes.float8_e4m3fn).astype(np.float64)),
        f"values are rounded to fp8e4 {READ}",
    ),
    "keys zero": (with_keys(lambda k: 0 * k), f"keys are zero {READ}"),
    "keys negated": (with_keys(columns(lambda k: -k, 4, 5, 6)), f"keys are negated in columns 4–6 of each head {READ}"),
    "keys more": (
        with_keys(columns(lambda k: 1.3 * k, 0, 3, 6)),
        f"keys are 1.3 × baseline's in every third column from 0 to 6 of each head {READ}",
    ),
    "keys swapped": (
        with_keys(columns(lambda k: k[..., [2, 3, 0, 1]], 1, 2, 8, 9)),
        f"keys have columns 1–2 and columns 8–9 swapped {READ}",
    ),
    "keys rotated": (
        with_keys(columns(lambda k: np.roll(k, 1, axis=-1), *range(4, 12))),
        f"keys have columns 4–11 rotated by 1 {READ}",
    ),
    "keys rounded": (
        with_keys(lambda k: k.astype(ml_dtypes.float8_e4m3fn).astype(np.float64)),
        f"keys are rounded to fp8e4 {READ}",
    ),
    "own key": (
        with_keys(columns(lambda k: k + 0.4, 7), own=True),
        f"keys are baseline's + 0.4 in column 7 of each head {READ}, of the token's own position",
    ),
    "own value": (
        with_own_value(columns(lambda v: 1.2 * v, 0, 3, 6)),
        "1.2 × baseline's in every third column from 0 to 6 of each head "
        "as attention reads them in target (KV cache), of the token's own position",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_attention_cause_is_named(tmp_path: Path, name: str) -> None:
    make, sentence = PLANTED[name]
    found = why(tmp_path, make)
    assert found is not None
    assert sentence in found.sentence
    assert found.share > 0.9999


def test_attention_unexplained_keys_and_values_have_no_cause(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    changes = (lambda v: v * rng.uniform(0.5, 1.5, v.shape), lambda v: v + 0.2 * v**3)
    for number, (change, read) in enumerate(product(changes, (with_values, with_keys))):
        found = why(tmp_path / str(number), read(change))
        assert found is None or not found.is_clear


def test_attention_unexplained_output_has_no_cause(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)

    def noisy(q: Array, k: Array, v: Array, cos: Array, sin: Array) -> Array:
        return plain(q + 0.3 * rng.standard_normal(q.shape), k, v, cos, sin)

    found = why(tmp_path, noisy)
    assert found is None or not found.is_clear


def test_attention_mask_place_has_request_query_key_and_index(tmp_path: Path) -> None:
    mask = np.where(np.tril(np.ones((4, 4), bool)), 0.0, -1e9).astype(np.float32)
    before = np.stack([mask, mask])[:, None]
    after = before.copy()
    after[1, 0, 2, 3] = 0.0
    for name, value in (("b", before), ("t", after)):
        with RunFactory(tmp_path / name) as run:
            rows = [RowSpan("a", 0, 4, 0, 0), RowSpan("b", 0, 3, 0, 5)]  # b is padded on the left
            run.step(grid=(2, 4), rows=rows, token_ids=range(7))
            run.put("model.layers.0:in[attention_mask]", value)
    with open_run(tmp_path / "b") as one, open_run(tmp_path / "t") as two:
        first = compare(one, two).first_divergence
        shown = two.array(two.select(["*attention_mask*"])[0])[1, 0, 2, 3]
    assert first is not None
    assert first.explanation is not None
    text = "target's mask shows 1 place more in 1 row, the first of request b at query position 1, key position 2"
    assert first.explanation.sentence == f"{text} ([1,0,2,3])"
    assert shown == 0.0
