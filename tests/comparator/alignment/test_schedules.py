"""One model over the same tokens, scheduled in every way: each row meets its own, and one bad row is found.

The baseline is one right-padded forward over whole texts, whose requests have no names but their places in the batch.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_llama
from compare_runs import diff
from engine_helpers import reference
from sglang_dumps import serve_llama

from tapscope.comparator import Report
from tapscope.dumper import Dumper, make_observer
from tapscope.dumper.config import DumperConfig
from tapscope.engine import LLM

TEXTS = ([9, 4, 7, 30, 31, 32, 33, 90], [9, 4, 8, 60, 61], [9, 4, 7, 30, 44, 70, 71, 72, 73, 74, 75, 76])
NUM_ROWS = sum(map(len, TEXTS))
RULES = ["model.layers.*:out=full", "*.o_proj:out=full", "*.mlp:out=full", "model.norm:out=full", "lm_head:out=full"]
ORDER = (2, 0, 1)

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama") / "model", seed=3, num_hidden_layers=2)


@pytest.fixture(scope="module")
def base(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "base"
    with Dumper(reference(llama), path, keep="off", rules=RULES), torch.no_grad():
        reference(llama)(**padded(TEXTS, left=False))
    return path


def padded(texts: Sequence[Sequence[int]], *, left: bool) -> dict[str, torch.Tensor]:
    """input_ids and attention_mask, [batch, longest text]."""
    longest = max(map(len, texts))
    ids, mask = torch.full((len(texts), longest), 5), torch.zeros(len(texts), longest, dtype=torch.long)
    for i, text in enumerate(texts):
        at = slice(longest - len(text), None) if left else slice(0, len(text))
        ids[i, at], mask[i, at] = torch.tensor(text), 1
    return {"input_ids": ids, "attention_mask": mask}


def left_padded(model: Any) -> None:
    """Positions count from the first token of each text."""
    inputs = padded([TEXTS[i] for i in ORDER], left=True)
    model(**inputs, position_ids=(inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0))


def left_padded_with_the_padding_counted(model: Any) -> None:
    """Positions count from the first slot: what one gets who does not pass any. RoPE does not mind."""
    inputs = padded([TEXTS[i] for i in ORDER], left=True)
    model(**inputs, position_ids=torch.arange(inputs["input_ids"].shape[1])[None].expand(len(ORDER), -1))


def one_by_one(model: Any) -> None:
    """Batches of one, all of them called "0"."""
    for i in ORDER:
        model(input_ids=torch.tensor([TEXTS[i]]))


def chunked(model: Any) -> None:
    """Chunks of 3 through the cache."""
    for text in TEXTS:
        cache = None
        for start in range(0, len(text), 3):
            cache = model(input_ids=torch.tensor([text[start : start + 3]]), past_key_values=cache, use_cache=True)
            cache = cache.past_key_values


def decoded(model: Any, bad: tuple[int, int] | None = None) -> None:
    """A prefill of the first 4 tokens, then a batch of single tokens a step, in another order."""
    texts = [TEXTS[i] for i in ORDER]
    cache = model(input_ids=torch.tensor([text[:4] for text in texts]), use_cache=True).past_key_values
    for step in range(4, max(map(len, texts))):
        ids = torch.tensor([[text[min(step, len(text) - 1)]] for text in texts])
        live = torch.tensor([[step < len(text)] for text in texts]).long()
        mask = torch.cat([torch.ones(3, step, dtype=torch.long), live], 1)
        for i, text in enumerate(texts):
            mask[i, len(text) :] = 0
        hook = (
            model.model.layers[1].mlp.down_proj.register_forward_hook(partial(damage, row=bad[1]))
            if bad and bad[0] == step
            else None
        )
        model(
            input_ids=ids,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
            position_ids=torch.tensor([[step]] * 3),
        )
        if hook is not None:
            hook.remove()


def damage(module: Any, args: Any, output: torch.Tensor, *, row: int) -> torch.Tensor:
    """One channel of one row is wrong."""
    changed = output.clone()
    changed[row, ..., 7] += 0.5
    return changed


def growing(model: Any) -> None:
    """No cache: the whole text again for each new token."""
    for text in TEXTS:
        for end in range(len(text) - 2, len(text) + 1):
            model(input_ids=torch.tensor([text[:end]]))


def check(report: Report, num_rows: int = NUM_ROWS) -> None:
    assert not any(f.verdict.is_bad for f in report.findings)
    assert {f.rows.num_compared for f in report.findings if not f.verdict.is_orphan} == {num_rows}
    assert (report.coverage.partial, report.coverage.forks, report.exit_code) == ((), (), 0)


@pytest.mark.parametrize(
    "schedule", [left_padded, left_padded_with_the_padding_counted, one_by_one, chunked, decoded, growing]
)
def test_schedules_of_one_model_agree_row_by_row(
    base: Path, llama: Path, tmp_path: Path, schedule: Callable[[Any], None]
) -> None:
    with Dumper(reference(llama), tmp_path / "t", keep="off", rules=RULES), torch.no_grad():
        schedule(reference(llama))
    report = diff(base, tmp_path / "t")
    check(report)
    assert report.coverage.num_rows_recomputed == ((0, 2 * NUM_ROWS - 9) if schedule is growing else (0, 0))


def test_schedules_bad_row_of_a_decode_step_is_named(base: Path, llama: Path, tmp_path: Path) -> None:
    with Dumper(reference(llama), tmp_path / "t", keep="off", rules=RULES), torch.no_grad():
        decoded(reference(llama), bad=(6, 1))  # the second of the batch is the first text
    report = diff(base, tmp_path / "t")
    found = report.first_divergence
    assert found is not None
    assert (found.module, found.finding.worst and found.finding.worst.text()) == (
        "model.layers.1.mlp",
        "request 0, position 6",
    )


@pytest.mark.parametrize("pages", [None, 4])
def test_schedules_engine_agrees_for_concurrent_and_queued_requests(
    base: Path, llama: Path, tmp_path: Path, pages: int | None
) -> None:
    config = DumperConfig(keep="off", rules=tuple(RULES))
    observer = partial(make_observer, out=str(tmp_path / "t"), config=config)
    with LLM(llama, observer=observer, logits="all", page_size=4, num_pages=pages) as llm:
        prompts = [TEXTS[i][:3] for i in ORDER]
        forced = [[*TEXTS[i][3:], 1] for i in ORDER]
        for prompt, tokens in zip(prompts, forced, strict=True):
            llm.submit(prompt, max_new_tokens=len(tokens), forced_token_ids=tokens, ignore_eos=True)
        while llm.has_work:
            llm.step()
    check(diff(base, tmp_path / "t"))


def test_schedules_sglang_dump_matches_by_request_id_and_position(base: Path, llama: Path, tmp_path: Path) -> None:
    """Chunks of 3, then single tokens, whose lengths are those of the context."""
    texts = {name: TEXTS[i] for name, i in zip("xyz", ORDER, strict=True)}
    serve_llama(reference(llama), tmp_path / "t", texts, tp=2, cuts=(3, 6, 7, 8, 9, 10, 11))
    report = diff(base, tmp_path / "t")
    assert "rows of t are inferred from the recorded arguments of its model" in report.coverage.warnings
    found = {f.site: f for f in report.findings if f.site in ("model.norm:out", "model.layers.1.mlp:out")}
    assert [(f.verdict.is_bad, f.rows.num_compared) for f in found.values()] == [(False, NUM_ROWS)] * 2
    assert (report.coverage.num_rows_aligned, report.coverage.forks) == (NUM_ROWS, ())
