"""Requests meet by chosen names, then by tokens: each once, never by a mere number that names another text."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from compare_runs import diff
from factories import RunFactory
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tapscope.comparator import Report, Verdict, compare
from tapscope.comparator.alignment.request_history import Request
from tapscope.comparator.alignment.requests import best_shift, match_requests
from tapscope.comparator.report.table import render
from tapscope.comparator.runs.token_ids import TokenIds
from tapscope.core.observe import RowSpan
from tapscope.run_format.run import Run
from tapscope.sources import open_run

Step = Sequence[tuple[str, int, int, Sequence[int]]]
"""(request, position, visit, tokens) of each request in one packed step."""


def record(path: Path, steps: Sequence[Step], *, phase: str | None = None, bad: tuple[int, int] | None = None) -> Run:
    """Each row's value is a function of its request's tokens so far; ``bad`` is the (step, slot) of a damaged one."""
    texts: dict[str, dict[int, int]] = {}
    with RunFactory(path) as run:
        for number, parts in enumerate(steps):
            rows, values, ids = [], [], []
            for request, position, visit, tokens in parts:
                rows.append(RowSpan(request, position, len(tokens), visit, len(ids)))
                text = texts[request] = {p: t for p, t in texts.get(request, {}).items() if p < position}
                for p, token in enumerate(tokens, position):
                    text[p] = token
                    values.append(sum(np.sin(t * (q + 2)) for q, t in text.items()))
                ids += tokens
            if bad is not None and bad[0] == number:
                values[bad[1]] += 1.0
            long = any(len(tokens) > 1 for *_, tokens in parts)
            run.step(grid=(len(ids),), rows=rows, token_ids=ids, phase=phase or ("prefill" if long else "decode"))
            run.put("norm:out", np.outer(np.asarray(values, np.float32), np.arange(1, 9, dtype=np.float32)), dims="t h")
    return open_run(path)


def diff_steps(
    path: Path, left: Sequence[Step], right: Sequence[Step], *, bad: tuple[int, int] | None = None
) -> Report:
    return diff(record(path / "b", left), record(path / "t", right, bad=bad))


TEXTS = [[5, 6, 7, 8], [9, 10, 11], [5, 6, 12, 13, 14]]


def test_requests_equal_prompts_precede_batch_indices(tmp_path: Path) -> None:
    left = [[(str(i), 0, 0, text) for i, text in enumerate(TEXTS)]]
    right = [[(str(2 - i), 0, 0, text) for i, text in enumerate(TEXTS)]]
    report = diff_steps(tmp_path, left, right)
    assert (report.coverage.num_rows_aligned, report.coverage.forks, report.exit_code) == (12, (), 0)
    assert "2 requests with different names paired by equal prompts" in report.coverage.warnings


def test_requests_bad_row_of_a_permuted_batch_has_the_baselines_name(tmp_path: Path) -> None:
    left = [[(str(i), 0, 0, text) for i, text in enumerate(TEXTS)]]
    right = [[(str(2 - i), 0, 0, text) for i, text in enumerate(TEXTS)]]
    worst = diff_steps(tmp_path, left, right, bad=(0, 5)).findings[0].worst
    assert worst is not None
    assert (worst.request, worst.position) == ("1", 1)


def test_requests_user_given_ids_precede_tokens(tmp_path: Path) -> None:
    left = [[("chat", 0, 0, [1, 2, 3]), ("code", 0, 0, [1, 2, 4])]]
    right = [[("chat", 0, 0, [1, 2, 4]), ("code", 0, 0, [1, 2, 3])]]
    report = diff_steps(tmp_path, left, right)
    assert [(f.request, f.position, f.baseline_token, f.target_token) for f in report.coverage.forks] == [
        ("chat", 2, 3, 4),
        ("code", 2, 4, 3),
    ]
    assert "the prompts differ: request chat at position 2, 2 in all" in report.coverage.partial
    assert report.exit_code == 1


def test_requests_numbers_without_an_equal_prompt_match_by_number(tmp_path: Path) -> None:
    report = diff_steps(tmp_path, [[("0", 0, 0, [1, 2, 3])]], [[("0", 0, 0, [1, 4, 3])]])
    assert (report.coverage.num_rows_aligned, report.coverage.num_rows_forked) == (1, (2, 2))
    assert report.coverage.forks[0].in_prompt


def test_requests_with_different_completions_match_by_prompt(tmp_path: Path) -> None:
    left = [[("0", 0, 0, [1, 2, 3]), ("1", 0, 0, [1, 2, 9])], [("0", 3, 0, [4]), ("1", 3, 0, [5])]]
    right = [[("8", 0, 0, [1, 2, 9]), ("9", 0, 0, [1, 2, 3])], [("8", 3, 0, [5]), ("9", 3, 0, [7])]]
    report = diff_steps(tmp_path, left, right)
    (fork,) = report.coverage.forks
    assert (fork.request, fork.position, fork.baseline_token, fork.target_token, fork.in_prompt) == (
        "0",
        3,
        4,
        7,
        False,
    )
    assert (report.coverage.num_rows_aligned, report.exit_code) == (7, 0)


def test_requests_equal_prompts_match_in_order_with_a_warning(tmp_path: Path) -> None:
    left = [[("0", 0, 0, [1, 2]), ("1", 0, 0, [1, 2])]]
    right = [[("7", 0, 0, [1, 2]), ("8", 0, 0, [1, 2]), ("9", 0, 0, [1, 2])]]
    report = diff_steps(tmp_path, left, right)
    assert "2 requests have the same tokens as another one: paired in order" in report.coverage.warnings
    assert report.coverage.partial[0] == "request 9 is only in t"
    report = diff_steps(tmp_path / "one", [left[0][:1]], right)
    assert "1 request has the same tokens as another one: paired in order" in report.coverage.warnings


def test_requests_reused_id_is_another_request(tmp_path: Path) -> None:
    """Two batches of a Hugging Face model in a row, against an engine that took all four prompts at once."""
    texts = [[1, 2, 3], [4, 5], [1, 2, 6, 7], [8, 9, 10]]
    left = [[("0", 0, 0, texts[0]), ("1", 0, 0, texts[1])], [("0", 0, 0, texts[2]), ("1", 0, 0, texts[3])]]
    right = [[(str(i), 0, 0, text) for i, text in enumerate(texts)]]
    report = diff_steps(tmp_path, left, right, bad=(0, 7))
    assert report.coverage.num_rows_aligned == 12
    worst = report.findings[0].worst
    assert worst is not None
    assert worst.text() == "request 0 (step 1), position 2"


def test_requests_growing_prompt_matches_cached_decoding(tmp_path: Path) -> None:
    text = [3, 1, 4, 1, 5]
    grown = [[("0", 0, 0, text[:n])] for n in (3, 4, 5)]
    cached = [[("a", 0, 0, text[:3])], [("a", 3, 0, text[3:4])], [("a", 4, 0, text[4:])]]
    report = diff_steps(tmp_path, grown, cached)
    assert (report.coverage.num_rows_aligned, report.coverage.num_rows_recomputed, report.exit_code) == (5, (7, 0), 0)


def test_requests_epochs_over_one_batch_match_by_step(tmp_path: Path) -> None:
    """Values change with the weights: the second time must not meet the first."""
    for name in ("b", "t"):
        with RunFactory(tmp_path / name) as run:
            for step in range(3):
                run.step(grid=(2,), rows=[RowSpan("0", 0, 2, 0, 0)], token_ids=[1, 2], phase="train")
                if name == "b" or step:
                    run.put("norm:out", np.full((2, 4), step + 1.0, np.float32), dims="t h")
    (found,) = diff(tmp_path / "b", tmp_path / "t").findings
    assert (found.verdict, found.rows.num_compared, found.rows.num_absent) == (Verdict.SAME, 4, 2)


def test_requests_rejected_draft_tokens_are_excluded(tmp_path: Path) -> None:
    left = [[("a", 0, 0, [1, 2, 3])], [("a", 3, 0, [4])], [("a", 4, 0, [5])]]
    drafted = [[("a", 0, 0, [1, 2, 3])], [("a", 3, 0, [4, 9, 9])], [("a", 4, 1, [5])]]
    report = diff_steps(tmp_path, left, drafted)
    assert (report.coverage.num_rows_aligned, report.coverage.num_rows_replaced, report.exit_code) == (5, (0, 2), 0)
    assert report.coverage.forks == ()


def test_requests_draft_tree_is_excluded_at_its_branches(tmp_path: Path) -> None:
    """Nobody says which branch was accepted; the rows that do not depend on it are compared."""
    left = [[("a", 0, 0, [1, 2, 3])], [("a", 3, 0, [4])], [("a", 4, 0, [5])], [("a", 5, 0, [6])]]
    tree = [[("a", 0, 0, [1, 2, 3])], [("a", 3, 0, [4, 9]), ("a", 4, 0, [8, 7]), ("a", 4, 0, [5])], [("a", 5, 0, [6])]]
    report = diff_steps(tmp_path, left, tree)
    assert (report.coverage.num_rows_aligned, report.coverage.num_rows_replaced, report.coverage.forks) == (
        5,
        (0, 4),
        (),
    )
    assert not any(f.verdict.is_bad for f in report.findings)


def test_requests_cached_prefix_leaves_the_other_rows_comparable(tmp_path: Path) -> None:
    text = list(range(20, 40))
    with record(tmp_path / "b", [[("0", 0, 0, text)], [("1", 0, 0, [*text[:12], 1, 2])]]) as one:
        for name, at in (("t", 12), ("u", 8)):
            with RunFactory(tmp_path / name) as run:
                run.step(grid=(20 - at,), rows=[RowSpan("3", at, 20 - at, 0, 0)], token_ids=text[at:])
                with open_run(tmp_path / "b") as base:
                    run.put("norm:out", base.array(base.records[0])[at:].copy(), dims="t h")
            with open_run(tmp_path / name) as two:
                report = compare(one, two)
            assert report.coverage.num_rows_aligned == 20 - at
            assert not any(f.verdict.is_bad for f in report.findings)


def test_requests_cached_prefix_is_the_reported_reason(tmp_path: Path) -> None:
    text = list(range(20, 40))
    with record(tmp_path / "b", [[("a", 0, 0, text)]]) as one, RunFactory(tmp_path / "t") as run:
        run.step(grid=(8,), rows=[RowSpan("a", 12, 8, 0, 0)], token_ids=text[12:])
        run.put("norm:out", one.array(one.records[0])[12:].copy(), dims="t h")
    (said,) = diff(tmp_path / "b", tmp_path / "t").coverage.partial
    assert said.startswith("12 token rows of b were never computed by t (request a begins at position 12 there")


def test_requests_gap_in_positions_is_the_reported_reason(tmp_path: Path) -> None:
    """Decoding continues one position too far."""
    text = list(range(20, 32))
    steps = [[("a", 0, 0, text[:10])], [("a", 10, 0, text[10:11])], [("a", 11, 0, text[11:])]]
    shifted = [steps[0], *([(name, at + 1, visit, ids) for name, at, visit, ids in step] for step in steps[1:])]
    record(tmp_path / "b", steps).close()
    record(tmp_path / "t", shifted).close()
    said = diff(tmp_path / "b", tmp_path / "t").coverage.partial[0]
    assert "(request a goes from position 9 to 11 at step 1 there: its positions are wrong" in said


def test_requests_offset_positions_align_by_tokens(tmp_path: Path) -> None:
    text = [3, 1, 4, 1, 5]
    with record(tmp_path / "b", [[("0", 0, 0, text)]]) as one, RunFactory(tmp_path / "t") as run:
        run.step(grid=(5,), rows=[RowSpan("0", 3, 5, 0, 0)], token_ids=text)
        run.put("norm:out", one.array(one.records[0]).copy(), dims="t h")
    report = diff(tmp_path / "b", tmp_path / "t")
    assert report.coverage.num_rows_aligned == 5
    assert "e.g. +3 for request 0: aligned by their tokens" in report.coverage.warnings[0]
    assert report.exit_code == 0


def test_requests_packed_into_one_row_are_separated(tmp_path: Path) -> None:
    """Position ids that start again, as padding-free training has them."""
    values = np.random.default_rng(0).standard_normal((12, 4)).astype(np.float32)
    ids = [token for text in TEXTS for token in text]
    with RunFactory(tmp_path / "b") as run:
        rows = [RowSpan(str(i), 0, len(t), 0, 5 * i) for i, t in enumerate(TEXTS)]
        run.step(grid=(3, 5), rows=rows, token_ids=ids)
        padded = np.zeros((3, 5, 4), np.float32)
        for i, (start, text) in enumerate(zip((0, 4, 7), TEXTS, strict=True)):
            padded[i, : len(text)] = values[start : start + len(text)]
        run.put("norm:out", padded, dims="b s h")
    with RunFactory(tmp_path / "t") as run:
        rows = [RowSpan("0", 0, len(t), 0, start) for t, start in zip(TEXTS, (0, 4, 7), strict=True)]
        run.step(grid=(1, 12), rows=rows, token_ids=ids)
        run.put("norm:out", values[None], dims="b s h")
    report = diff(tmp_path / "b", tmp_path / "t")
    assert (report.coverage.num_rows_aligned, report.exit_code) == (12, 0)


def request(name: str, tokens: Sequence[int], first: int = 0, prompt: int | None = None) -> Request:
    end = first + len(tokens)
    known = TokenIds()
    known.put(first, tokens)
    return Request(name, 0, 0, first, end, first + prompt if prompt is not None else end, known)


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=1, max_size=8), st.randoms())
@settings(max_examples=100)
def test_requests_any_shuffled_batch_matches_one_to_one(texts: list[list[int]], random: object) -> None:
    order = list(range(len(texts)))
    random.shuffle(order)  # type: ignore[attr-defined]
    left = [request(str(i), text) for i, text in enumerate(texts)]
    right = [request(str(i), texts[k]) for i, k in enumerate(order)]
    found = match_requests(("b", "t"), left, right)
    assert len({p.baseline for p in found.pairs}) == len({p.target for p in found.pairs}) == len(texts)
    assert all(left[p.baseline].tokens == right[p.target].tokens and p.shift == 0 for p in found.pairs)
    assert found.problems == []


def test_requests_longest_common_prefix_wins() -> None:
    left = [request("0", [1, 2, 3, 4, 5], prompt=2), request("1", [1, 2, 3, 9], prompt=2)]
    right = [request("5", [1, 2, 3, 9, 9], prompt=2), request("6", [1, 2, 3, 4, 7], prompt=2)]
    found = match_requests(("b", "t"), left, right)
    assert [(p.baseline, p.target) for p in found.pairs] == [(0, 1), (1, 0)]


def test_requests_common_system_prompt_is_not_a_match() -> None:
    found = match_requests(("b", "t"), [request("0", [1, 2, 3, 4])], [request("1", [1, 2, 3, 5])])
    assert found.pairs == []
    assert found.problems == ["request 0 is only in b", "request 1 is only in t"]


@pytest.mark.parametrize(("tokens", "first", "expected"), [([1, 2, 3], 5, (5, 3)), ([1, 9, 9], 5, (0, 0))])
def test_requests_position_shift_needs_several_equal_tokens(
    tokens: list[int], first: int, expected: tuple[int, int]
) -> None:
    assert best_shift(request("0", [1, 2, 3]), request("0", tokens, first)) == expected


@st.composite
def interrupted(draw: st.DrawFn) -> list[Step]:
    """Three requests in chunks of any size and order; any of them may be thrown out and computed again from 0."""
    texts = {"0": [2, 7, 1, 8, 2], "1": [2, 7, 1, 9], "2": [5]}
    done, visits, steps = dict.fromkeys(texts, 0), dict.fromkeys(texts, 0), []
    while any(done[r] < len(texts[r]) for r in texts):
        waiting = [r for r in texts if done[r] < len(texts[r])]
        step = []
        for r in draw(st.lists(st.sampled_from(waiting), min_size=1, unique=True)):
            if done[r] and visits[r] < 2 and draw(st.booleans()):
                done[r], visits[r] = 0, visits[r] + 1
            count = draw(st.integers(1, len(texts[r]) - done[r]))
            step.append((r, done[r], visits[r], texts[r][done[r] : done[r] + count]))
            done[r] += count
        steps.append(step)
    return steps


@given(interrupted(), interrupted(), st.randoms())
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_requests_preempted_rows_match_exactly_once(
    tmp_path_factory: pytest.TempPathFactory, left: list[Step], right: list[Step], random: object
) -> None:
    step = random.randrange(len(right))  # type: ignore[attr-defined]
    flat = [(r, p + i) for r, p, _, tokens in right[step] for i in range(len(tokens))]
    slot = random.randrange(len(flat))  # type: ignore[attr-defined]
    report = diff_steps(tmp_path_factory.mktemp("rows"), left, right, bad=(step, slot))
    (found,) = report.findings
    assert report.coverage.num_rows_aligned >= 10
    assert report.coverage.num_rows_unaligned == (0, 0)
    if found.verdict is Verdict.SAME:  # only the target computed the damaged row again
        assert report.coverage.num_rows_recomputed[1] > 0
    else:
        assert found.worst is not None
        assert (found.worst.request, found.worst.position) == flat[slot]


CALLS = {"x": [2, 7, 1, 8, 2], "y": [2, 7, 1, 9], "z": [5], "w": [2, 7, 1, 8, 2, 8]}


@st.composite
def batches(draw: st.DrawFn) -> list[tuple[str, list[tuple[str, int, int]]]]:
    """(how a step is laid out, (request, first position, rows) of each), the requests in chunks, in any batches."""
    done, steps = dict.fromkeys(CALLS, 0), []
    layouts = draw(st.sampled_from([["packed"], ["left", "right"]]))
    while waiting := [r for r in CALLS if done[r] < len(CALLS[r])]:
        chosen = draw(st.permutations(waiting))[: draw(st.integers(1, len(waiting)))]
        step = []
        for r in chosen:
            count = draw(st.integers(1, len(CALLS[r]) - done[r]))
            step.append((r, done[r], count))
            done[r] += count
        steps.append((draw(st.sampled_from(layouts)), step))
    return steps


def batched(path: Path, steps: Sequence[tuple[str, list[tuple[str, int, int]]]], *, bad: tuple[str, int] | None) -> Run:
    """The steps as tensors, rubbish where nothing is computed; ``bad`` is the (request, position) of a wrong row."""
    with RunFactory(path) as run:
        for layout, step in steps:
            longest = max(count for *_, count in step)
            shape = (len(step), longest) if layout != "packed" else (sum(count for *_, count in step),)
            values = np.full((int(np.prod(shape)), 8), 99, np.float32)
            rows, ids, slot = [], [], 0
            for i, (name, first, count) in enumerate(step):
                if layout != "packed":
                    slot = i * longest + (longest - count if layout == "left" else 0)
                rows.append(RowSpan(name, first, count, 0, slot))
                ids += CALLS[name][first : first + count]
                for p in range(first, first + count):
                    text = np.array(CALLS[name][: p + 1])
                    values[slot] = np.sin(np.outer(text + 1, np.arange(1, 9))).sum(0) + ((name, p) == bad)
                    slot += 1
            phase = "prefill" if longest > 1 else "decode"
            run.step(grid=shape, rows=rows, token_ids=ids, phase=phase)
            run.put("norm:out", values.reshape(*shape, 8), dims="t h" if layout == "packed" else "b s h")
    return open_run(path)


@given(batches(), batches(), st.sampled_from([(r, p) for r, text in CALLS.items() for p in range(len(text))]))
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_requests_bad_row_is_found_for_any_batching_and_padding(
    tmp_path_factory: pytest.TempPathFactory,
    left: list[tuple[str, list[tuple[str, int, int]]]],
    right: list[tuple[str, list[tuple[str, int, int]]]],
    bad: tuple[str, int],
) -> None:
    path = tmp_path_factory.mktemp("rows")
    report = diff(batched(path / "b", left, bad=None), batched(path / "t", right, bad=bad))
    (found,) = report.findings
    assert (report.coverage.num_rows_aligned, found.rows.num_compared) == (16, 16)
    assert found.worst is not None
    assert (found.verdict, found.worst.request, found.worst.position) == (Verdict.DIFFERS, *bad)
    assert found.metrics is not None
    assert found.metrics.num_equal == 15 * 8


def test_requests_draft_rows_of_one_run_are_not_missing(tmp_path: Path) -> None:
    """A draft head computed one more row of the request in one run, since other drafts were accepted."""
    for name, num_rows in (("b", 3), ("t", 2)):
        with RunFactory(tmp_path / name) as run:
            for phase, count, tokens in (("prefill", 3, [1, 2, 3]), ("draft", num_rows, [2, 3, 4])):
                run.step(grid=(count,), rows=[RowSpan("a", 0, count, 0, 0)], token_ids=tokens[:count], phase=phase)
                model = "draft" if phase == "draft" else ""
                run.put("norm:out", np.ones((count, 4), np.float32), dims="t h", model=model)
    report = diff(tmp_path / "b", tmp_path / "t")
    coverage = report.coverage
    assert (report.exit_code, coverage.is_complete, coverage.num_rows_aligned) == (0, True, 5)
    assert (coverage.num_rows_replaced, coverage.num_rows_unaligned) == ((1, 0), (0, 0))
    note = "1 row of a draft model was computed by one run only: the runs drafted different tokens there"
    assert note in coverage.warnings
    assert any("0 unaligned, 1 of rejected or unmatched drafts" in line.plain for line in render(report))
