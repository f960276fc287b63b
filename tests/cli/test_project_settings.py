"""Project options: `tapscope.toml`, `[tool.tapscope]` in `pyproject.toml`, and `tapscope.testing`."""

import shutil
from pathlib import Path

import pytest
from comparator_toy import Toy, damaged, prompts, weights

from tapscope.cli import main
from tapscope.core.errors import ConfigError, RunNotFoundError, UsageError
from tapscope.sources import open_run
from tapscope.testing import assert_runs_close

BAD = "model.layers.0.mlp.down_proj"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, tables = tmp_path_factory.mktemp("runs"), weights(layers=1)
    for name, values in (("base", tables), ("bad", damaged(tables, BAD, "noise"))):
        Toy(values).write(path / name, prompts((6, 4))).close()
    Toy(tables, dtype="bfloat16").write(path / "good", prompts((6, 4))).close()
    return path


@pytest.fixture
def project(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a project directory with the runs; the working directory is one of its subdirectories."""
    shutil.copytree(runs, tmp_path, dirs_exist_ok=True)
    (tmp_path / "tests").mkdir()
    monkeypatch.chdir(tmp_path / "tests")
    return tmp_path


def test_project_settings_of_either_file_are_applied_and_reported(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    diff = ["diff", "../base", "../bad"]
    assert main(diff) == 1
    capsys.readouterr()
    (project / "pyproject.toml").write_text('[tool.tapscope.diff]\nallow_differ = ["*.layers.*", "*"]\n')
    assert main(diff) == 0
    where = f"options of {project}/pyproject.toml [tool.tapscope.diff]: '--allow-differ=*.layers.*' '--allow-differ=*'"
    assert where in capsys.readouterr().err
    (project / "tapscope.toml").write_text("[diff]\nrtol = 1e9\ndetail = false\nall = true\n")
    assert main(diff) == 0
    assert f"options of {project}/tapscope.toml [diff]: --rtol=1000000000.0 --all" in capsys.readouterr().err


def test_project_settings_give_way_to_the_command_line(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "tapscope.toml").write_text("[diff]\nrtol = 1e9\n")
    assert main(["diff", "../base", "../bad", "-q"]) == 0
    assert main(["diff", "../base", "../bad", "-q", "--rtol", "0"]) == 1
    assert capsys.readouterr().err == ""


def test_project_settings_variable_names_the_file_or_none(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "tapscope.toml").write_text("[diff]\nrtol = 1e9\n")
    (project / "strict.toml").write_text("[diff]\nrtol = 0\n")
    for named, code in (("", 1), ("../strict.toml", 1), ("../tapscope.toml", 0)):
        monkeypatch.setenv("TAPSCOPE_CONFIG", named)
        assert main(["diff", "../base", "../bad"]) == code, named
    monkeypatch.setenv("TAPSCOPE_CONFIG", "absent.toml")
    capsys.readouterr()
    assert main(["diff", "../base", "../good"]) == 2
    assert capsys.readouterr().err == "tapscope: error: TAPSCOPE_CONFIG=absent.toml: no such file\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[dif]\n", "[dif]: unknown command (did you mean diff?)"),
        ("[diff]\nlyers = '0'\n", "[diff]: unknown option 'lyers' (did you mean layers?)"),
        ("[diff]\nall = 1\n", "[diff]: invalid all=1: expected true or false"),
        ("[diff]\nrtol = true\n", "[diff]: invalid rtol=True: expected a string or a number, or a list of them"),
        ("[diff]\nrtol = [1, 2]\n", "[diff]: invalid rtol=[1, 2]: expected one value"),
        ("[diff]\nrtol = 'x'\n", "[diff]: argument --rtol: invalid value 'x': expected a number; see"),
        ("diff = 3\n", "diff=3: expected a table of options"),
        ("[diff\n", "invalid TOML: "),
    ],
)
def test_project_settings_errors_name_the_file(
    project: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "tapscope.toml").write_text(text)
    assert main(["diff", "../base", "../good"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"tapscope: error: {project}/tapscope.toml: {message}")
    assert error.count("\n") == 1
    assert main(["diff", "../base", "--nonsense"]) == 2


def test_assert_runs_close_passes_and_returns_the_report(project: Path) -> None:
    report = assert_runs_close("../base", project / "good")
    assert report.exit_code == 0
    with open_run("../base") as base, open_run("../good") as good:
        assert assert_runs_close(base, good, skip="*:in[*]", layers="0").exit_code == 0


def test_assert_runs_close_fails_with_the_answer(project: Path) -> None:
    with pytest.raises(AssertionError) as failure:
        assert_runs_close("../base", "../bad")
    lines = str(failure.value).splitlines()
    assert lines[0] == "../base and ../bad:"
    assert [line.split()[0] for line in lines[1:]] == ["what", "where", "why", "next"]
    assert f" {BAD} " in lines[1]


def test_assert_runs_close_takes_the_options_of_diff_and_of_the_project(project: Path) -> None:
    assert_runs_close("../base", "../bad", rule=["layers.0=rel < 1e9", ".=rel < 1e9"])
    (project / "tapscope.toml").write_text("[diff]\nrtol = 1e9\njson = true\n")
    assert_runs_close("../base", "../bad")
    with pytest.raises(AssertionError):
        assert_runs_close("../base", "../bad", rtol=0)


def test_assert_runs_close_refuses_invalid_arguments_in_one_sentence(project: Path) -> None:
    with pytest.raises(ConfigError, match=r"^assert_runs_close: unknown option 'lyers' \(did you mean layers\?\)$"):
        assert_runs_close("../base", "../good", lyers="0")
    with pytest.raises(ConfigError, match="unknown option 'json'"):
        assert_runs_close("../base", "../good", json=True)
    with pytest.raises(UsageError, match=r"^argument --layers: 'a' is not a list of numbers"):
        assert_runs_close("../base", "../good", layers="a")
    with pytest.raises(RunNotFoundError):
        assert_runs_close("../base", "../absent")
