"""Whatever lies in a run's directory: a comparison ends in a report or one sentence, in time, and never in a pass."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from comparator_toy import Toy, prompts, weights
from compare_runs import diff
from factories import RunFactory
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tapscope import cli
from tapscope.comparator import Verdict
from tapscope.comparator.report.answer import answer
from tapscope.core.errors import NothingInCommonError, RunCorruptError, TapscopeError
from tapscope.sources import open_run

TABLES = weights(layers=2)
PROMPTS = prompts((9, 5))
QUICK = settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two runs that agree, the second of two ranks and in three steps."""
    folder = tmp_path_factory.mktemp("pair")
    Toy(TABLES).write(folder / "b", PROMPTS).close()
    Toy(TABLES, tp=2).write(folder / "t", PROMPTS, steps=(3, 6)).close()
    return folder / "b", folder / "t"


@pytest.fixture
def damaged(pair: tuple[Path, Path], tmp_path: Path) -> tuple[Path, Path]:
    """A copy of the pair, to be damaged."""
    return tuple(shutil.copytree(path, tmp_path / path.name) for path in pair)  # type: ignore[return-value]


def segment(run: Path, rank: int = 0) -> Path:
    return next((run / f"rank-{rank:05d}").glob("seg-*"))


def entry_of(run: Path, site: str, step: int = 0, rank: int = 0) -> tuple[Path, int, int]:
    """(file, offset, bytes) of one record."""
    with open_run(run) as opened:
        (record,) = [r for r in opened.select([site], steps=[step], ranks=[rank]) if r.key.site == site]
    assert record.entry is not None
    return run / f"rank-{rank:05d}" / record.entry.file, record.entry.offset, record.entry.nbytes


def overwrite(file: Path, offset: int, content: bytes) -> None:
    with file.open("r+b") as opened:
        opened.seek(offset)
        opened.write(content)


def test_corrupt_records_absent_in_the_healthy_pair(pair: tuple[Path, Path]) -> None:
    assert diff(*pair).exit_code == 0


def test_corrupt_records_flipped_bytes_are_damage_not_a_culprit(damaged: tuple[Path, Path]) -> None:
    file, offset, nbytes = entry_of(damaged[1], "model.layers.1.mlp.down_proj:out", step=1)
    overwrite(file, offset + nbytes // 2, b"\x7f\x01\x02\x03")
    report = diff(*damaged)
    assert report.first_divergence is None
    assert report.num_bad == 0
    (said,) = report.coverage.damaged
    assert "t is damaged, 1 record left out, 1 of them replicas that other ranks hold" in said
    assert "the bytes of model.layers.1.mlp.down_proj:out at step 1 differ from those recorded" in said
    assert report.exit_code == 3
    rest = next(f for f in report.findings if f.site == "model.layers.1.mlp.down_proj:out")
    assert rest.verdict is Verdict.CLOSE
    assert rest.rows.num_compared == 14  # what the other rank holds is the same
    assert cli.main(["diff", *map(str, damaged)]) == 3


def test_corrupt_records_do_not_hide_a_bug_elsewhere(pair: tuple[Path, Path], tmp_path: Path) -> None:
    wrong = {"model.layers.0.mlp.act_fn:out": lambda x: x * 1.05}
    Toy(TABLES, tp=2, hooks=wrong).write(tmp_path / "t", PROMPTS, steps=(3, 6)).close()
    file, offset, nbytes = entry_of(tmp_path / "t", "model.embed_tokens:out", step=2)
    overwrite(file, offset, np.full(nbytes // 4, 1e3, np.float32).tobytes())
    report = diff(pair[0], tmp_path / "t")
    assert report.exit_code == 3
    assert report.first_divergence is not None
    assert report.first_divergence.module == "model.layers.0.mlp.act_fn"
    allowed = diff(pair[0], tmp_path / "t", allow_partial=True)
    assert allowed.exit_code == 1


@pytest.mark.parametrize("side", [0, 1])
def test_corrupt_records_rest_of_a_truncated_segment_is_compared(damaged: tuple[Path, Path], side: int) -> None:
    file = segment(damaged[side])
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size * 2 // 3)
    report = diff(*damaged)
    assert report.exit_code == 3
    assert report.num_bad == 0
    assert report.coverage.num_sites_matched > 10
    assert f"{damaged[side].name} is damaged" in report.coverage.damaged[0]
    assert diff(*damaged, allow_partial=True).exit_code == 0


def test_corrupt_records_flipped_shard_excludes_its_firing_on_all_ranks(damaged: tuple[Path, Path]) -> None:
    site = "model.layers.1.self_attn.q_proj:out"
    file, offset, nbytes = entry_of(damaged[1], site, step=1)
    overwrite(file, offset, np.full(nbytes // 4, 1e3, np.float32).tobytes())
    report = diff(*damaged)
    assert (report.exit_code, report.num_bad) == (3, 0)
    assert "t is damaged, 2 records left out (" in report.coverage.damaged[0]
    rest = next(f for f in report.findings if f.site == site)
    assert rest.rows.num_compared == 14 - 5  # all but those of the damaged step


@pytest.mark.parametrize("lost", [0, 1])
def test_corrupt_records_missing_segment_leaves_the_other_segments(damaged: tuple[Path, Path], lost: int) -> None:
    segment(damaged[1], rank=lost).unlink()
    report = diff(*damaged)
    assert (report.exit_code, report.num_bad) == (3, 0)
    rows = {f.site: f.rows.num_compared for f in report.findings}
    whole = {"model.embed_tokens:out", "model.layers.1.mlp.down_proj:out", "model.norm:out"}
    assert {site for site in whole if rows[site] == 14} == whole
    assert rows["model.layers.1.self_attn.q_proj:out"] == rows["lm_head:out"] == 0
    assert "replicas that other ranks hold" in report.coverage.damaged[0]


def test_corrupt_records_run_without_segments_is_an_error(damaged: tuple[Path, Path]) -> None:
    for rank in (0, 1):
        segment(damaged[1], rank).unlink()
    with pytest.raises(RunCorruptError, match=r"t: every value to compare is damaged: .*missing"):
        diff(*damaged)
    assert cli.main(["diff", *map(str, damaged)]) == 3


def test_corrupt_records_impossible_entry_is_damage(damaged: tuple[Path, Path]) -> None:
    index = damaged[0] / "rank-00000" / "records.jsonl"
    lines = index.read_text().splitlines()
    number, line = next((i, json.loads(x)) for i, x in enumerate(lines) if '"model.norm:out"' in x and '"entry"' in x)
    for entry, words in (
        ([line["entry"][0], -64, line["entry"][2]], "negative offset"),
        ([line["entry"][0], line["entry"][1], 12], "its shape needs"),
        ([line["entry"][0], 1 << 60, line["entry"][2]], "a record needs"),
        (["../../secret", 0, line["entry"][2]], "missing"),
    ):
        lines[number] = json.dumps(line | {"entry": entry})
        index.write_text("\n".join(lines) + "\n")
        report = diff(*damaged)
        assert report.exit_code == 3
        assert words in report.coverage.damaged[0]


def test_corrupt_records_runs_of_different_models_report_what_does_not_fit(tmp_path: Path) -> None:
    Toy(TABLES).write(tmp_path / "b", PROMPTS).close()
    Toy(weights(seed=4, layers=3)).write(tmp_path / "t", PROMPTS).close()
    report = diff(tmp_path / "b", tmp_path / "t")
    assert report.exit_code == 1
    assert "layer 2 is only in t" in report.coverage.partial
    with pytest.raises(NothingInCommonError, match="were they captured from models of one architecture"):
        diff(_single_site(tmp_path / "one", "vision.patch_embed:out"), _single_site(tmp_path / "two", "lm.logits:out"))


def _single_site(path: Path, site: str) -> Path:
    from factories import RunFactory

    with RunFactory(path) as run:
        run.step()
        run.put(site, np.ones((4, 4), np.float32))
    return path


def outcome(paths: tuple[Path, Path]) -> int:
    """The exit code of a comparison; any error but ours is the test's failure."""
    try:
        report = diff(*paths)
    except TapscopeError as error:
        assert "\n" not in str(error), str(error)  # noqa: PT017
        return error.exit_code
    list(report.to_json())
    return report.exit_code


def has_problems(run: Path) -> bool:
    """Whether the reader itself sees that something is wrong."""
    try:
        with open_run(run) as opened:
            return bool(opened.problems)
    except TapscopeError:
        return True


Change = Callable[[bytes], bytes]


@st.composite
def _changes(draw: st.DrawFn) -> Change:
    """Bytes flipped, cut, repeated or put in, at places that are shares of the length."""
    kind = draw(st.sampled_from(["flip", "cut", "repeat", "insert"]))
    places = draw(st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=6))
    content = draw(st.binary(min_size=1, max_size=6))

    def change(data: bytes) -> bytes:
        found = bytearray(data)
        for share in places:
            at = int(share * len(found))
            if kind == "flip":
                found[at : at + len(content)] = content
            elif kind == "cut":
                del found[at:]
            elif kind == "repeat":
                found[at:at] = found[at : at + 200]
            else:
                found[at:at] = content
        return bytes(found)

    return change


@QUICK
@given(st.sampled_from(["records.jsonl", "run.json", "seg"]), _changes(), st.sampled_from([0, 1]))
def test_corrupt_records_fuzzed_run_is_a_report_or_one_sentence(
    pair: tuple[Path, Path], tmp_path: Path, what: str, change: Change, side: int
) -> None:
    run = pair[side]
    file = {"run.json": run / "run.json", "seg": segment(run)}.get(what, run / "rank-00000" / "records.jsonl")
    original = file.read_bytes()
    changed = change(original)
    try:
        file.write_bytes(changed)
        code = outcome(pair)
        assert code in (0, 1, 2, 3)
        if has_problems(run):
            assert code != 0
    finally:
        file.write_bytes(original)


@pytest.mark.parametrize("seed", range(16))
def test_corrupt_records_invalid_record_json_is_reported(pair: tuple[Path, Path], tmp_path: Path, seed: int) -> None:
    """Lines whose members have other types and sizes than they must."""
    rng = np.random.default_rng(seed)
    run = shutil.copytree(pair[1], tmp_path / "t")
    index = run / "rank-00000" / "records.jsonl"
    lines = [json.loads(line) for line in index.read_text().splitlines()]
    odd = [
        None,
        -1,
        0,
        2**70,
        1e308,
        "x",
        "\ud800",
        [],
        [[]],
        {},
        {"a": [1]},
        True,
        ["a"] * 3,
        [1, 2, 3],
        "t h[tp]",
        "NaN",
    ]
    for _ in range(6):
        line = lines[rng.integers(len(lines))]
        name = rng.choice(sorted(line))
        line[name] = odd[rng.integers(len(odd))]
    index.write_text("\n".join(map(json.dumps, lines)) + "\n")
    assert outcome((pair[0], run)) in (0, 1, 2, 3)
    for verb in (["ls"], ["info"]):
        assert cli.main([*verb, str(run)]) in (0, 1, 2, 3)


def put(path: Path, values: np.ndarray | None) -> Path:
    with RunFactory(path) as run:
        run.step()
        if values is not None:
            run.put("norm:out", values)
    return path


def test_corrupt_records_unalignable_runs_are_one_sentence(tmp_path: Path) -> None:
    real = np.ones((4, 6), np.float32)
    baseline = put(tmp_path / "b", real)
    report = diff(baseline, put(tmp_path / "c", real.astype(np.complex64)))
    assert report.exit_code == 3
    assert "complex64: complex and real values cannot be compared" in report.findings[0].notes[0]
    with pytest.raises(NothingInCommonError, match="e holds no record; see tapscope info"):
        diff(baseline, put(tmp_path / "e", None))


def test_corrupt_records_non_finite_value_has_no_worst_column(tmp_path: Path) -> None:
    wrong = np.ones((4, 6), np.float32)
    wrong[2, 3] = np.nan
    report = diff(put(tmp_path / "b", np.ones((4, 6), np.float32)), put(tmp_path / "t", wrong))
    assert report.first_divergence is not None
    assert report.first_divergence.place is not None
    assert report.first_divergence.place.index == (2,)


def test_corrupt_records_shards_of_a_missing_rank_make_the_data_partial(damaged: tuple[Path, Path]) -> None:
    whole = diff(*damaged)
    shutil.rmtree(damaged[1] / "rank-00001")
    report, allowed = diff(*damaged), diff(*damaged, allow_partial=True)
    assert (report.exit_code, allowed.exit_code, report.num_bad) == (1, 0, 0)
    assert len(report.findings) < len(whole.findings)
    assert "t: never connected: rank 1" in report.coverage.partial
    assert any(s.endswith("shard 1 is missing: rank 1 never connected") for s in report.coverage.warnings)
    what, _, why, following = answer(allowed)
    assert what == "what      agrees where compared, but the data are partial (allowed)"
    assert why.startswith("why       t: never connected: rank 1")
    assert following == f"next      tapscope info {damaged[1]}"
    assert answer(diff(damaged[1], damaged[0]))[3] == following  # the run that lacks it, on whichever side


def test_corrupt_records_gap_unexplained_by_a_missing_rank_counts(pair: tuple[Path, Path], tmp_path: Path) -> None:
    module = "model.layers.1.mlp.down_proj"
    Toy(TABLES, tp=2, hooks={f"{module}:out": lambda x: x + 1}).write(tmp_path / "t", PROMPTS).close()
    shutil.rmtree(tmp_path / "t" / "rank-00001")
    report = diff(pair[0], tmp_path / "t", allow_partial=True)
    assert report.exit_code == 1
    assert report.first_divergence is not None
    assert report.first_divergence.module == module
    assert answer(report)[0].endswith("; on partial data")


def test_corrupt_records_missing_shard_of_a_complete_run_always_counts(tmp_path: Path) -> None:
    values = np.ones((4, 6), np.float32)
    with RunFactory(tmp_path / "b") as run:
        run.step()
        run.put("norm:out", values, dims="t h")
        run.put("mlp:out", values, dims="t h")
    with RunFactory(tmp_path / "t", mesh={"tp": 2}) as run:
        run.step()
        run.put("norm:out", {0: values[:, :3], 1: values[:, 3:]}, dims="t h[tp]")
        run.put("mlp:out", values[:, :3], dims="t h[tp]")
    report = diff(tmp_path / "b", tmp_path / "t", allow_partial=True)
    assert not report.coverage.ledgers[1].missing_ranks
    assert (report.exit_code, report.num_bad) == (1, 1)
    assert answer(report)[2] == "why       dims 't h[tp]' need 2 shards over tp; shard 1 is missing"


def test_corrupt_records_deselected_ranks_are_not_a_finding(pair: tuple[Path, Path]) -> None:
    report = diff(*pair, ranks=frozenset({0}))
    assert report.exit_code == 0
    assert any(s.endswith("shard 1 is missing: --ranks 0 excludes it") for s in report.coverage.warnings)
    with pytest.raises(NothingInCommonError, match=r"gate_proj:out: .*shard 1 is missing: --ranks 0 excludes it"):
        diff(*pair, ranks=frozenset({0}), sites=("*.gate_proj:out",))
