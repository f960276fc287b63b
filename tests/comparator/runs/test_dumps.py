"""What dumps of others do not say: ranks without a mesh, flattened axes, values that are None, expected gaps."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compare_runs import diff
from sglang_dumps import SglangDump

from tapscope.cli import main
from tapscope.core.errors import NothingInCommonError, RuleError, RunNotFoundError


def dumps(tmp_path: Path, left: Any, right: Any, *, tp: int = 1, said: dict[str, Any] | None = None) -> list[str]:
    """Two dumps of one value each, where nothing is known of rows; ``said`` are tags of both."""
    for name, value in (("base", left), ("target", right)):
        dump = SglangDump(tmp_path / name, tp=tp, framework="none")
        dump.number = 0
        dump.dump("x", value, **(said or {}))
    return [str(tmp_path / "base"), str(tmp_path / "target")]


def write(folder: Path, values: dict[str, tuple[Any, str | None]]) -> Path:
    dump = SglangDump(folder)
    dump.number = 0
    for name, (value, dims) in values.items():
        dump.dump(name, value, dims=dims)
    return folder


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize(("one", "two"), [("t n d", "t (n*d)"), ("b s n d", "b s (n*d)")])
def test_dumps_flattened_axes_match_without_a_row_table(tmp_path: Path, one: str, two: str, swapped: bool) -> None:
    batch = (2,) if one.startswith("b") else ()
    whole = torch.randn(*batch, 6, 4, 8)
    flat = whole.reshape(*batch, 6, 32)
    base = write(tmp_path / "base", {"x": (flat if swapped else whole, two if swapped else one)})
    target = write(tmp_path / "target", {"x": (whole if swapped else flat, one if swapped else two)})
    report = diff(base, target)
    assert report.exit_code == 0, report.findings[0].notes
    wrong = flat.clone()
    wrong.view(-1)[77] += 1
    other = write(tmp_path / "wrong", {"x": (wrong, two)})
    report = diff(base, other)
    assert report.exit_code == 1
    assert report.first_divergence is not None


def test_dumps_flattened_axes_of_another_size_do_not_match(tmp_path: Path) -> None:
    base = write(tmp_path / "base", {"x": (torch.randn(6, 4, 8), "t n d")})
    target = write(tmp_path / "target", {"x": (torch.randn(6, 36), "t (n*d)")})
    assert diff(base, target).exit_code != 0


def test_dumps_none_equals_only_none(tmp_path: Path) -> None:
    assert diff(*dumps(tmp_path / "1", None, None)).exit_code == 0
    assert diff(*dumps(tmp_path / "2", None, 3)).exit_code == 1


def test_dumps_ranks_without_a_mesh_are_compared_rank_by_rank(tmp_path: Path) -> None:
    shards = {rank: torch.randn(6, 8) for rank in range(2)}
    paths = dumps(tmp_path / "equal", shards, shards, tp=2)
    report = diff(*paths)
    assert report.exit_code == 0
    wrong = {0: shards[0], 1: shards[1] * 1.5}
    report = diff(*dumps(tmp_path / "wrong", shards, wrong, tp=2))
    assert report.exit_code == 1
    assert report.first_divergence is not None
    assert report.first_divergence.place is not None
    assert report.first_divergence.place.rank == 1
    assert any("each rank was compared with" in said for said in report.coverage.warnings)
    more = {0: torch.randn(6, 8), 1: torch.randn(6, 4)}
    assert diff(*dumps(tmp_path / "other", shards, more, tp=2)).exit_code == 3


def test_dumps_shadowed_dims_are_a_note(tmp_path: Path) -> None:
    paths = dumps(tmp_path, torch.ones(4, 3), torch.ones(4, 3))
    words = ["--dims", ":tap[x]=t h", "--dims", "*=t h"]
    assert main(["diff", *paths, *words]) == 0
    from tapscope.comparator.options.overrides import parse_dims

    report = diff(*paths, dims=tuple(map(parse_dims, words[1::2])))
    assert any("unused, since earlier dims cover" in said for said in report.coverage.warnings)
    with pytest.raises(RuleError, match=r"no tensor .* is at 'none'; sites are :tap\[x\]"):
        diff(*paths, dims=(parse_dims("none=t h"),))


def test_dumps_allow_missing_site_is_reported_but_does_not_fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = {f"a{i}": (torch.ones(3), None) for i in range(2)} | {f"b{i}": (torch.ones(3), None) for i in range(6)}
    base = write(tmp_path / "base", whole)
    target = write(tmp_path / "target", {name: whole[name] for name in ("a0", "a1")})
    words = ["diff", str(base), str(target)]
    assert main(words) == 1 or "only in baseline" in capsys.readouterr().out
    capsys.readouterr()
    layer = SglangDump(tmp_path / "layers")
    layer.number = 0
    for number in range(2):
        layer.dump("x", torch.ones(3), layer_id=number)
    one = SglangDump(tmp_path / "one")
    one.number = 0
    one.dump("x", torch.ones(3), layer_id=0)
    words = ["diff", str(layer.folder), str(one.folder)]
    assert main(words) == 1
    assert "layer 1 is only in layers" in capsys.readouterr().out
    assert main([*words, "--allow-missing", "layers.1:*"]) == 0
    out = capsys.readouterr().out
    assert "1 site allowed to be missing, e.g. layers.1:tap[x]" in out
    with pytest.raises(RuleError, match="no site matches"):
        diff(*words[1:], allow_missing=("layers.9:*",))


def test_dumps_allow_missing_records_do_not_fail(tmp_path: Path) -> None:
    for name, steps in (("base", 3), ("target", 2)):
        dump = SglangDump(tmp_path / name)
        for step in range(3):
            dump.number = step
            dump.dump("y", torch.ones(3))
            if step < steps:
                dump.dump("x", torch.ones(3) * step)
    paths = [str(tmp_path / "base"), str(tmp_path / "target")]
    assert diff(*paths).exit_code == 1
    report = diff(*paths, allow_missing=(":tap[x]",))
    assert report.exit_code == 0
    assert any("1 site allowed to be missing" in said for said in report.coverage.warnings)


def test_dumps_json_reports_that_the_only_site_is_not_comparable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alike, apart = [{0: torch.randn(4, 3), 1: torch.randn(4, n)} for n in (3, 5)]
    for ranks, left, right, code in ((1, torch.ones(4, 3), torch.ones(5, 7), 1), (2, alike, apart, 3)):
        paths = dumps(tmp_path / str(ranks), left, right, tp=ranks)
        assert main(["diff", *paths, "--json"]) == code
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [line["type"] for line in lines] == ["header", "finding", "summary"]
        assert lines[1]["notes"]
        assert lines[2]["exit_code"] == code
        assert main(["diff", *paths]) == code
        assert lines[1]["notes"][0] in capsys.readouterr().out


def test_dumps_rule_on_a_plain_value_reports_that_it_is_not_a_tensor(tmp_path: Path) -> None:
    from tapscope.comparator.verdict.rules import parse_rule

    report = diff(*dumps(tmp_path, 0.5, 0.25), rules=(parse_rule("x=rel < 1"),))
    assert report.exit_code == 1
    assert any("applies to tensors; a plain value must be equal" in note for note in report.findings[0].notes)


def test_dumps_empty_directory_is_reported_as_empty(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunNotFoundError, match="it is empty; capture a run with"):
        diff(tmp_path / "empty", tmp_path / "empty")


def test_dumps_without_a_common_site_are_an_error(tmp_path: Path) -> None:
    base = write(tmp_path / "base", {"x": (torch.ones(3), None)})
    target = write(tmp_path / "target", {"y": (torch.ones(3), None)})
    with pytest.raises(NothingInCommonError, match="no site in common"):
        diff(base, target)
