"""Sites selected by regular expressions on the command line."""

from pathlib import Path

import numpy as np
import pytest
from factories import RunFactory

from tapscope import cli
from tapscope.core.errors import RuleError
from tapscope.expr.site_pattern import site_pattern


@pytest.fixture
def runs(tmp_path: Path) -> tuple[str, str]:
    """Return two runs that differ in layers 1 and 10."""
    for name, shift in (("a", 0.0), ("b", 1.0)):
        with RunFactory(tmp_path / name) as made:
            made.step()
            for layer in (0, 1, 10):
                made.put(f"layers.{layer}.mlp:out", np.full((2, 4), layer + shift * (layer > 0), np.float32))
    return str(tmp_path / "a"), str(tmp_path / "b")


def test_regex_selects_sites_of_diff_and_ls(runs: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["diff", *runs, "--site", r"re:layers\.[0-9]\.mlp"]) == 1
    assert "2 sites matched" in capsys.readouterr().out
    assert cli.main(["diff", *runs, "--skip", r"re:layers\.(1|10)\."]) == 0
    assert cli.main(["diff", *runs, "--allow-differ", r"re:layers\.1"]) == 0
    capsys.readouterr()
    assert cli.main(["ls", runs[0], "--site", r"re:\.10\."]) == 0
    assert "layers.10.mlp:out" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("re:(", "invalid regular expression '('"),
        ("re:(a+)+$", "may take too long"),
        ("re:nothing", "no site matches 're:nothing'"),
    ],
)
def test_bad_regex_is_one_sentence(
    runs: tuple[str, str], capsys: pytest.CaptureFixture[str], pattern: str, message: str
) -> None:
    for words in (["diff", *runs], ["ls", runs[0]]):
        assert cli.main([*words, "--site", pattern]) == 2
        assert message in capsys.readouterr().err


def test_regex_is_searched_and_globs_stay_globs() -> None:
    assert site_pattern(r"re:mlp$").matches("layers.0.mlp") is True
    assert site_pattern("layers.0.*").matches("model.layers.0.mlp:out") is True
    with pytest.raises(RuleError, match="site pattern 're:\\['"):
        site_pattern("re:[")
