"""Runs of speculative decoding: comparisons leave out rejected rows, and a rejected row that stays in use is found."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from compare_runs import diff
from draft_heads import make_eagle, make_llama
from moe_checkpoints import make_moe
from speculation import OracleProposer, speculate
from torch import Tensor

from tapscope.comparator import Verdict
from tapscope.dashboard.model.token_labels import TokenLabels
from tapscope.dumper import make_observer
from tapscope.dumper.config import DumperConfig
from tapscope.engine import LLM, SamplingParams
from tapscope.engine.kv_cache.kv_cache import KVCache
from tapscope.engine.requests.request import Generation, Request
from tapscope.engine.requests.step_plan import ScheduledRequest
from tapscope.engine.scheduling.scheduler import Scheduler
from tapscope.engine.scheduling.state_group import StateGroup
from tapscope.render.row_labels import row_map
from tapscope.sources import open_run

PROMPTS = [[5, 6, 7, 8, 9], [300, 301, 302]]
NAMES = ["first", "second"]
PARAMS = SamplingParams(max_new_tokens=10, temperature=0.8, seed=3, ignore_eos=True)
SETTINGS: dict[str, Any] = {"logits": "all", "prefix_cache": False, "page_size": 4}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llama") / "model", "llama", seed=1, num_hidden_layers=2)


@pytest.fixture(scope="module")
def plain(path: Path) -> tuple[Path, dict[tuple[int, ...], tuple[int, ...]]]:
    """The plain engine's run and outputs."""
    observer = partial(make_observer, out=str(path.parent / "plain"), config=DumperConfig(keep="full"))
    with LLM(path, observer=observer, **SETTINGS) as llm:
        found = llm.generate(PROMPTS, PARAMS, request_ids=NAMES)
    return path.parent / "plain", {generation.prompt_ids: generation.token_ids for generation in found}


def _speculative(path: Path, out: Path, outputs: dict[tuple[int, ...], tuple[int, ...]], **options: Any) -> LLM:
    observer = partial(make_observer, out=str(out), config=DumperConfig(keep="full"))
    llm = LLM(path, observer=observer, speculative_algorithm="NGRAM", **SETTINGS, **options)
    speculate(llm, OracleProposer(outputs, 0.6, 512), 3)
    return llm


def test_diff_of_speculative_and_plain_decoding_agrees(
    path: Path, plain: tuple[Path, dict[tuple[int, ...], tuple[int, ...]]], tmp_path: Path
) -> None:
    with _speculative(path, tmp_path / "run", plain[1]) as llm:
        found = llm.generate(PROMPTS, PARAMS, request_ids=NAMES)
        stats = llm.engine.state()["speculation"]
    assert [generation.token_ids for generation in found] == list(plain[1].values())
    report = diff(plain[0], tmp_path / "run")
    assert report.exit_code == 0, str(report)
    assert report.coverage.num_rows_replaced == (0, stats["num_draft_tokens"] - stats["num_accepted_tokens"])
    assert report.coverage.num_rows_unaligned == (0, 0)
    with open_run(tmp_path / "run") as run:
        steps = [by_rank[0] for by_rank in run.steps.values() if by_rank[0].info.drafts]
    assert {step.info.phase for step in steps} == {"verify"}
    assert sum(sum(step.info.drafts.values()) for step in steps) == stats["num_draft_tokens"]
    assert sum(sum(step.counts.accepted.values()) for step in steps if step.counts) == stats["num_accepted_tokens"]


def test_diff_names_the_attention_that_read_a_rejected_draft(
    path: Path,
    plain: tuple[Path, dict[tuple[int, ...], tuple[int, ...]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seeded bug: the key and value of the first rejected draft stay in the cache."""
    kept: list[int] = []
    write = KVCache.write

    def write_others(self: KVCache, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        rows = [row for row, slot in enumerate(slots.tolist()) if slot not in kept]
        write(self, layer, slots[rows], key[rows], value[rows])

    with _speculative(path, tmp_path / "run", plain[1]) as llm:
        append = llm.engine.scheduler._append

        def note_rejected(request: Request, scheduled: ScheduledRequest, drawn: Any) -> int:
            count = append(request, scheduled, drawn)
            if count <= scheduled.num_drafts and not kept:
                position = scheduled.position + count
                kept.append(request.table(0).pages[position // 4] * 4 + position % 4)
            return count

        monkeypatch.setattr(llm.engine.scheduler, "_append", note_rejected)
        monkeypatch.setattr(KVCache, "write", write_others)
        llm.generate(PROMPTS, PARAMS, request_ids=NAMES)
    assert kept
    report = diff(plain[0], tmp_path / "run")
    assert report.exit_code == 1
    assert report.first_divergence is not None
    assert report.first_divergence.site == "model.layers.0.self_attn.attn:out", str(report)


def test_diff_compares_draft_models_with_draft_models(
    path: Path, plain: tuple[Path, dict[tuple[int, ...], tuple[int, ...]]], tmp_path: Path
) -> None:
    """Steps of the draft model have their own row tables; a run without a draft is compared without these steps."""
    draft = make_checkpoint(tmp_path / "draft", "llama", seed=1, num_hidden_layers=2)
    options = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": draft} | SETTINGS
    for name in ("once", "again"):
        observer = partial(make_observer, out=str(tmp_path / name), config=DumperConfig(keep="full"))
        with LLM(path, observer=observer, **options) as llm:
            found = llm.generate(PROMPTS, PARAMS, request_ids=NAMES)
        assert [generation.token_ids for generation in found] == list(plain[1].values())
    with open_run(tmp_path / "once") as run:
        keys = [record.key for record in run.records if record.key.site == "model.layers.1:out"]
        assert {key.model for key in keys} == {"", "draft"}
        assert {key.micro for key in keys if key.model == "draft"} == {0, 1, 2}
        assert {key.micro for key in keys if key.model == ""} == {0}
        phases = [by_rank[0].info.phase for by_rank in run.steps.values()]
        assert phases[:5] == ["prefill", "draft", "draft", "draft", "verify"]
    report = diff(tmp_path / "once", tmp_path / "again")
    assert report.exit_code == 0, str(report)
    assert any(finding.site.startswith("draft.") for finding in report.findings)
    assert all(finding.verdict is Verdict.SAME for finding in report.findings)
    report = diff(plain[0], tmp_path / "once")
    assert report.exit_code == 0, str(report)
    assert report.coverage.num_rows_unaligned == (0, 0)
    assert any("steps of a draft model, which are not compared" in note for note in report.coverage.warnings)


def test_diff_names_the_layer_whose_state_was_not_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeded bug: a request continues from the recurrent state after its last draft, accepted or not."""
    path = make_moe(tmp_path / "model", "qwen3_next", seed=3)
    observer = partial(make_observer, out=str(tmp_path / "plain"), config=DumperConfig(keep="full"))
    with LLM(path, observer=observer, batch_invariant=True, **SETTINGS) as llm:
        found = llm.generate(PROMPTS[:1], PARAMS, request_ids=NAMES[:1])
    outputs = {generation.prompt_ids: generation.token_ids for generation in found}
    with _speculative(path, tmp_path / "good", outputs, batch_invariant=True) as llm:
        assert llm.generate(PROMPTS[:1], PARAMS, request_ids=NAMES[:1])[0].token_ids == found[0].token_ids
    report = diff(tmp_path / "plain", tmp_path / "good")
    assert report.exit_code == 0, str(report)
    store = StateGroup.store

    def store_last(self: StateGroup, request: Request) -> None:
        accepted, request.accepted_drafts = request.accepted_drafts, tuple(range(len(request.state.draft_slots)))
        store(self, request)
        request.accepted_drafts = accepted

    monkeypatch.setattr(StateGroup, "store", store_last)
    with _speculative(path, tmp_path / "bad", outputs, batch_invariant=True) as llm:
        llm.generate(PROMPTS[:1], PARAMS, request_ids=NAMES[:1])
    report = diff(tmp_path / "plain", tmp_path / "bad")
    assert report.exit_code == 1
    assert report.first_divergence is not None
    assert report.first_divergence.site.startswith("model.layers.0.linear_attn."), str(report)


def test_dumps_rows_that_a_draft_model_computes_again_are_other_visits(path: Path, tmp_path: Path) -> None:
    draft = make_checkpoint(tmp_path / "draft", "llama", seed=2, num_hidden_layers=2)  # most of its drafts are rejected
    options = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": draft} | SETTINGS
    observer = partial(make_observer, out=str(tmp_path / "run"), config=DumperConfig(keep="stats"))
    with LLM(path, observer=observer, **options) as llm:
        llm.generate(PROMPTS, PARAMS, request_ids=NAMES)
    with open_run(tmp_path / "run") as run:
        drafts = [by_rank[0].info for by_rank in run.steps.values() if by_rank[0].info.phase == "draft"]
    rows = [
        (row.request, row.position + i, row.visit) for info in drafts for row in info.rows for i in range(row.count)
    ]
    assert len(set(rows)) == len(rows)
    assert any(visit for _, _, visit in rows)


def test_dumps_of_a_draft_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The accepted branch is compared and the others are left out; the diff names a branch whose rows are not moved."""
    path, head = make_llama(tmp_path / "model"), make_eagle(tmp_path / "head")
    options: dict[str, Any] = {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": head}
    options |= {"speculative_eagle_topk": 3, "speculative_num_steps": 3, "speculative_num_draft_tokens": 9}

    generated = {}

    def run(name: str, **settings: Any) -> dict[str, Any]:
        observer = partial(make_observer, out=str(tmp_path / name), config=DumperConfig(keep="full"))
        with LLM(path, observer=observer, **SETTINGS | settings) as llm:
            generated[name] = llm.generate(PROMPTS, PARAMS, request_ids=NAMES)
        return llm.engine.state().get("speculation", {})

    run("plain")
    stats = run("good", **options)
    _check_names_of_verified_rows(tmp_path / "good", generated["good"])
    report = diff(tmp_path / "plain", tmp_path / "good")
    assert report.exit_code == 0, str(report)
    assert report.coverage.num_rows_replaced == (0, stats["num_draft_tokens"] - stats["num_accepted_tokens"])
    assert report.coverage.num_rows_unaligned == (0, 0)
    assert diff(tmp_path / "good", tmp_path / "good").exit_code == 0
    _check_rows_of_the_head(run, tmp_path, options)
    monkeypatch.setattr(KVCache, "move", lambda *_: None)
    run("bad", **options)
    report = diff(tmp_path / "plain", tmp_path / "bad")
    assert report.exit_code == 1
    assert report.first_divergence is not None
    assert report.first_divergence.site == "model.layers.0.self_attn.attn:out", str(report)


def _check_names_of_verified_rows(folder: Path, generated: list[Generation]) -> None:
    """Check verified steps: accepted drafts are rows of their request, rejected ones name their branch."""
    with open_run(folder) as run:
        tokens = run.tokens()
        num_accepted = num_rejected = 0
        for step, by_rank in run.steps.items():
            line = by_rank[0]
            if line.info.phase != "verify" or line.counts is None:
                continue
            assert sum(own.count for own, _ in line.own_rows()) == line.info.num_rows - sum(
                line.info.drafts[name] - line.counts.accepted.get(name, 0) for name in line.info.drafts
            )
            (record,) = run.select(["model.layers.1:out"], steps=[step])
            rows, labels = row_map(record, line), TokenLabels.of((run,), (line,))
            assert rows is not None
            places = [rows.place(row) for row in range(rows.num_rows)]
            assert len(set(places)) == len(places)
            assert [rows.row_of(place) for place in places if place] == list(range(len(places)))
            for place, token in zip(places, line.info.token_ids, strict=True):
                assert place is not None
                assert labels.of_place(place.request, place.position, place.branch).startswith(f" #{token}")
                if place.branch:
                    assert place.label == f"{place.request}:{place.position}/{place.branch:08x}"
                    num_rejected += 1
                else:
                    assert tokens[place.request][place.position] == token
                    num_accepted += 1
        assert num_rejected > num_accepted > 0
    for name, one in zip(NAMES, generated, strict=True):
        known = tokens[name]
        assert [known[position] for position in sorted(known)] == [*one.prompt_ids, *one.token_ids][: len(known)]


def _check_rows_of_the_head(run: Callable[..., dict[str, Any]], folder: Path, options: dict[str, Any]) -> None:
    """Check that sibling rows of the head's trees are compared with rows that share their prefix tokens."""

    def num_draft_rows(name: str) -> int:
        with open_run(folder / name) as opened:
            steps = [by_rank[0].info for by_rank in opened.steps.values() if by_rank[0].info.phase == "draft"]
        rows = [(row.request, row.position, row.visit, row.branch) for info in steps for row in info.rows]
        assert len({row[:3] for row in rows}) < len(set(rows)) == len(rows)
        return sum(info.num_rows for info in steps)

    run("again", **options, max_num_seqs=1)  # one request at a time: other steps, the same trees
    report = diff(folder / "good", folder / "again")
    assert report.exit_code == 0, str(report)
    findings = {finding.site: finding.rows for finding in report.findings}
    assert (
        findings["draft.layers.0.self_attn.attn:out"].num_compared == num_draft_rows("good") == num_draft_rows("again")
    )
    run("narrow", **options | {"speculative_eagle_topk": 2})
    report = diff(folder / "good", folder / "narrow")
    assert report.exit_code == 0, str(report)
    assert report.coverage.num_rows_unaligned == (0, 0)
    compared = {finding.site: finding.rows.num_compared for finding in report.findings}
    assert 0 < compared["draft.layers.0.self_attn.attn:out"] < num_draft_rows("good")


def test_dumps_of_a_draft_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head's forwards are steps of the model `draft`; the diff names a rejected draft that stays in the cache."""
    path = make_llama(tmp_path / "model")
    head = make_eagle(tmp_path / "head")
    options = {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": head, "batch_invariant": True}

    def run(name: str, **settings: Any) -> LLM:
        observer = partial(make_observer, out=str(tmp_path / name), config=DumperConfig(keep="full"))
        with LLM(path, observer=observer, **SETTINGS | settings) as llm:
            llm.generate(PROMPTS, PARAMS, request_ids=NAMES)
        return llm

    run("plain", batch_invariant=True)
    run("good", **options)
    report = diff(tmp_path / "plain", tmp_path / "good")
    assert report.exit_code == 0, str(report)
    assert report.coverage.num_rows_replaced[1] > 0
    with open_run(tmp_path / "good") as recorded:
        drafts = [record.key for record in recorded.records if record.key.model == "draft"]
        assert {"fc:out", "layers.0.self_attn.attn:out", "embed_tokens:out", "lm_head:out"} <= {k.site for k in drafts}
        assert {0, 1, 2} <= {key.micro for key in drafts}
        rows = [by_rank[0].info for by_rank in recorded.steps.values() if by_rank[0].info.phase == "draft"]
        assert [row.position for row in rows[0].rows] == [0, 0]
    report = diff(tmp_path / "good", tmp_path / "good")
    assert report.exit_code == 0, str(report)
    kept: list[int] = []
    write = KVCache.write

    def write_others(self: KVCache, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        is_target = len(self.layers) > 1
        rows = [row for row, slot in enumerate(slots.tolist()) if not (is_target and slot in kept)]
        write(self, layer, slots[rows], key[rows], value[rows])

    append = Scheduler._append

    def note_rejected(self: Scheduler, request: Request, scheduled: ScheduledRequest, drawn: Any) -> int:
        count = append(self, request, scheduled, drawn)
        if count <= scheduled.num_drafts and not kept:
            position = scheduled.position + count
            kept.append(request.table(0).pages[position // 4] * 4 + position % 4)
        return count

    monkeypatch.setattr(Scheduler, "_append", note_rejected)
    monkeypatch.setattr(KVCache, "write", write_others)
    run("bad", **options)
    assert kept
    report = diff(tmp_path / "plain", tmp_path / "bad")
    assert report.exit_code == 1
    assert report.first_divergence is not None
    assert report.first_divergence.site == "model.layers.0.self_attn.attn:out", str(report)
