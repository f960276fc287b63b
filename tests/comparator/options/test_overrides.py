"""Dims and meshes given at comparison time take effect, must match something, and are rejected where they are
invalid."""

import argparse
import json
from pathlib import Path

import numpy as np
import pytest
from compare_runs import diff
from factories import RunFactory

from tapscope.cli import compare_flags, main
from tapscope.comparator import CompareOptions, Verdict
from tapscope.comparator.options.map_file import DimsEntry
from tapscope.comparator.options.overrides import MeshEntry, parse_dims, parse_mesh
from tapscope.comparator.report.answer import answer
from tapscope.comparator.report.flags import flags
from tapscope.core.errors import ConfigError, DimsError, RuleError, TapscopeError
from tapscope.core.observe import RowSpan
from tapscope.sources import open_run

ROWS = 6
WHOLE = np.random.default_rng(1).standard_normal((ROWS, 8)).astype(np.float32)


def write(path: Path, parts: dict[int, np.ndarray], dims: str | None, *, mesh: bool = True) -> None:
    """Write two sites; without ``mesh``, the ranks do not record their coordinates."""
    with RunFactory(path, mesh={"tp": len(parts)}) as run:
        run.step(grid=(ROWS,), rows=[RowSpan("a", 0, ROWS, 0, 0)], token_ids=range(ROWS))
        run.put("layers.0.mlp:out", parts, dims=dims)
        run.put("norm:out", dict.fromkeys(parts, WHOLE), dims="t h # tp:replicated")
    if not mesh:
        for file in [path / "run.json", *path.glob("rank-*/records.jsonl")]:
            lines = [json.loads(line) for line in file.read_text().splitlines()] if file.suffix == ".jsonl" else []
            for line in lines:
                line.pop("mesh", None), line.pop("coords", None)
            manifest = json.loads(file.read_text()) | {"mesh": {}} if not lines else None
            file.write_text("".join(json.dumps(line) + "\n" for line in lines) if lines else json.dumps(manifest))


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    """Write an unsharded baseline, and a target in shards whose dims wrongly declare partial sums."""
    write(tmp_path / "b", {0: WHOLE}, "t h")
    write(tmp_path / "t", dict(enumerate(np.split(WHOLE, 2, axis=1))), "t h[tp:partial]")
    return tmp_path / "b", tmp_path / "t"


@pytest.mark.parametrize("glob", ["layers.0.mlp:out", "mlp", "target:layers.*", "target:*mlp:out"])
def test_overrides_dims_option_replaces_recorded_dims(
    runs: tuple[Path, Path], glob: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert diff(*runs).findings[0].verdict is Verdict.SHAPE
    given = [part for text in (f"{glob}=t h[tp]",) for part in ("--dims", text)]
    assert main(["diff", *map(str, runs), *given]) == 0
    assert "agree" in capsys.readouterr().out


def test_overrides_dims_option_precedes_map_file_dims(
    runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "map.yaml"
    file.write_text("dims:\n  - {site: '*mlp:out', dims: 't h[tp]', side: target}\n")
    assert main(["diff", *map(str, runs), "--map", str(file)]) == 0
    assert main(["diff", *map(str, runs), "--map", str(file), "--dims", "target:norm=t h # tp:replicated"]) == 0
    assert main(["diff", *map(str, runs), "--map", str(file), "--dims", "mlp=t h"]) == 1  # wrong dims
    assert "unused, since earlier dims cover '*mlp:out'" in capsys.readouterr().out


def test_overrides_first_matching_dims_apply(runs: tuple[Path, Path]) -> None:
    entries = parse_dims("target:layers.0.mlp=t h[tp]"), parse_dims("*=t h # tp:replicated")
    assert [f.verdict for f in diff(*runs, dims=entries).findings] == [Verdict.SAME, Verdict.SAME]


def test_overrides_dims_that_contradict_shapes_are_a_finding(runs: tuple[Path, Path]) -> None:
    found = diff(*runs, dims=(parse_dims("target:mlp=t n d[tp]"),)).findings[0]
    assert found.verdict is Verdict.SHAPE
    assert "dims 't n d[tp]' name 3 axes but the tensor has 2: (6, 4)" in found.notes[0]


@pytest.mark.parametrize(
    ("text", "error", "reason"),
    [
        ("layers.9.mlp=t h", RuleError, "no tensor of"),
        ("baseline:layers.9=t h", RuleError, "layers are"),
        ("mlp=t h[xx]", DimsError, "'xx'"),
        ("mlp", ConfigError, "must be GLOB=DIMS"),
        ("=t h", ConfigError, "must be GLOB=DIMS"),
        ("mlp=", ConfigError, "must be GLOB=DIMS"),
    ],
)
def test_overrides_invalid_dims_are_rejected(
    runs: tuple[Path, Path], text: str, error: type[TapscopeError], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(error, match=reason):
        diff(*runs, dims=(parse_dims(text),))
    assert main(["diff", *map(str, runs), "--dims", text]) == 2
    said = capsys.readouterr()
    assert "--dims" in said.err
    assert "Traceback" not in said.err


def test_overrides_dims_accept_sizes_and_declarations() -> None:
    entry = parse_dims("baseline:lm_head:out=t v=50257[tp] # dp:=attn_dp")
    assert (entry.side, entry.site, entry.dims) == ("baseline", "lm_head:out", "t v=50257[tp] # dp:=attn_dp")
    assert isinstance(entry, DimsEntry)


def test_overrides_mesh_option_sets_a_missing_mesh(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "b", {0: WHOLE}, "t h")
    write(tmp_path / "t", dict(enumerate(np.split(WHOLE, 2, axis=1))), "t h[tp]", mesh=False)
    runs = str(tmp_path / "b"), str(tmp_path / "t")
    found = diff(tmp_path / "b", tmp_path / "t").findings[0]
    assert "--mesh tp=2" in found.notes[0]
    assert main(["diff", *runs, "--mesh", "tp=2"]) == 0
    assert main(["diff", *runs, "--mesh", "target:pp=1,tp=2"]) == 0
    capsys.readouterr()
    for text in ("tp=3", "tp", "tp=0", "xx=2", "tp=2,tp=1", "baseline:tp=2", ""):
        assert main(["diff", *runs, "--mesh", text]) == 2, text
        assert "mesh" in capsys.readouterr().err
    assert main(["diff", runs[0], runs[0], "--mesh", "tp=2"]) == 2
    assert "both runs record their mesh, or have one rank" in capsys.readouterr().err


def test_overrides_last_mesh_axis_is_the_fastest(tmp_path: Path) -> None:
    write(tmp_path / "t", dict.fromkeys(range(6), WHOLE), None, mesh=False)
    with open_run(tmp_path / "t") as run:
        run.assume_mesh({"pp": 2, "tp": 3})
        run.assume_mesh({"pp": 2, "tp": 3})
        assert [run.coords(rank) for rank in (0, 1, 3)] == [
            {"pp": 0, "tp": 0},
            {"pp": 0, "tp": 1},
            {"pp": 1, "tp": 0},
        ]
        with pytest.raises(ConfigError, match="records another mesh"):
            run.assume_mesh({"tp": 6})
    assert parse_mesh("pp=2,tp=3") == MeshEntry("--mesh 'pp=2,tp=3'", (("pp", 2), ("tp", 3)))


def test_overrides_noise_run_uses_dims_and_mesh_of_the_baseline(tmp_path: Path) -> None:
    halves = dict(enumerate(np.split(WHOLE, 2, axis=1)))
    write(tmp_path / "b", halves, None, mesh=False)
    write(tmp_path / "twin", halves, None, mesh=False)
    write(tmp_path / "t", {0: WHOLE}, "t n")
    runs = [str(tmp_path / name) for name in ("b", "t")]
    flags = ["--mesh", "baseline:tp=2", "--dims", "baseline:mlp=t n[tp]", "--dims", "target:mlp=t n"]
    assert main(["diff", *runs, *flags]) == 0
    assert main(["diff", *runs, *flags, "--noise-run", str(tmp_path / "twin")]) == 0


@pytest.mark.parametrize("judged", [["--rtol", "0.1", "--atol", "1e-05"], ["--noise-run", "twin", "--margin", "2.5"]])
def test_overrides_options_round_trip_through_flags(judged: list[str], tmp_path: Path) -> None:
    file = tmp_path / "a map.yaml"
    file.write_text("dims:\n  - {site: '*mlp:out', dims: 't h[tp]', side: target}\n")
    words = [
        "--site",
        "*:out",
        "--skip",
        "norm",
        "--layers",
        "0-2,5",
        "--steps",
        "0",
        "--ranks",
        "0-1",
        "--map",
        str(file),
    ]
    words += [
        "--map",
        str(file),
        "--shift-steps",
        "-1",
        "--dims",
        "baseline:*=t h",
        "--mesh",
        "target:pp=2,tp=4",
        "--rule",
        "mlp=rel < 1",
    ]
    words += [*judged, "--detail", "--allow-partial"]
    parser = argparse.ArgumentParser()
    compare_flags.add_flags(parser)
    options = compare_flags.options_of(parser.parse_args(words))
    assert sorted(flags(options)) == sorted(words)
    assert compare_flags.options_of(parser.parse_args(flags(options))) == options
    assert flags(compare_flags.options_of(parser.parse_args([]))) == []
    both = CompareOptions(rtol=0.1, noise_run=tmp_path, margin=2.0)  # as if a browser set the tolerance later
    assert flags(both) == ["--rtol", "0.1"]


def test_overrides_next_command_keeps_the_options(runs: tuple[Path, Path]) -> None:
    report = diff(*runs, dims=(parse_dims("target:mlp=t h[tp]"),))
    assert answer(report)[-1] == f"next      tapscope view {runs[0]} {runs[1]} --dims 'target:mlp=t h[tp]'"
