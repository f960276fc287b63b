"""Invalid command lines, and unreadable or unwritable paths: a one-sentence error, no traceback."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import forkserver_pool as warm
import numpy as np
import pytest
from comparator_toy import Toy, prompts, weights
from soak_cases import mostly_soak

from tapscope.cli import main, output

ROOT = Path(__file__).resolve().parents[2]
ERROR = "tapscope: error: "


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the run `base` and the run `good`, which agrees with it."""
    path = tmp_path_factory.mktemp("runs")
    Toy(weights(layers=1)).write(path / "base", prompts((6, 4))).close()
    Toy(weights(layers=1), dtype="bfloat16").write(path / "good", prompts((6, 4))).close()
    return path


@pytest.fixture
def here(runs: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(runs)
    return runs


@pytest.fixture(scope="module")
def plain(runs: Path) -> str:
    """Return the output of `tapscope diff base good` in `runs`."""
    return shell(f"cd {shlex.quote(str(runs))} && tapscope diff base good").stdout


def shell(line: str, **env: str) -> "subprocess.CompletedProcess[str]":
    """Run a line of bash in which ``tapscope`` is the command."""
    program = f'tapscope() {{ {sys.executable} -m tapscope "$@"; }}; {line}'
    variables = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "FORCE_COLOR")} | env
    return subprocess.run(["bash", "-c", program], capture_output=True, text=True, env=variables, timeout=120)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("diff", "tapscope diff: missing argument: BASELINE, TARGET; see: tapscope diff --help"),
        ("diff base", "tapscope diff: missing argument: TARGET; see: tapscope diff --help"),
        ("diff base good more", "tapscope diff: unexpected argument 'more'; see: tapscope diff --help"),
        ("diff base good --lyers 1", "tapscope diff: unknown option --lyers (did you mean --layers?); see: "),
        ("diff base good --layer=1", "tapscope diff: unknown option --layer (did you mean --layers?); see: "),
        (
            "diff base good --tolerance 1e-3",
            "tapscope diff: unknown option --tolerance (did you mean --rtol or --atol?)",
        ),
        ("ls base --threshold 1", "tapscope ls: unknown option --threshold; see: "),
        ("ls base --sort szie", "(choose from 'seq', 'max', 'size') (did you mean size?); see: "),
        ("diff base good --qqqq", "tapscope diff: unknown option --qqqq; see: "),
        ("diff base good --layers a", "argument --layers: 'a' is not a list of numbers; write e.g. 0-3,27"),
        ("diff base good --steps 0-99999999999", "range 0-99999999999 in '0-99999999999' has more than 1,000,000"),
        ("diff base good --top x", "argument --top: 'x' is not a number of rows; give 1 or more"),
        (
            "diff base good --noise-run base --rtol 1e-3",
            "--rtol and --noise-run are two ways to judge the same values; give one",
        ),
        (
            "diff base good --noise-run base --atol 0",
            "--atol and --noise-run are two ways to judge the same values; give one",
        ),
        ("diff base good --margin 2", "--margin needs --noise-run RUN"),
        ("diff base good --rule lm_head=1e-3", "'1e-3' is not a condition: expected one such as rel < 1e-3"),
        ("diff base good --rule lm_head=rel", "'rel' is not a condition"),
        ("dif base good", "unknown command 'dif' (did you mean diff?); commands: dump, "),
        ("compare base good", "unknown command 'compare' (did you mean diff?); commands: dump, "),
        ("man", "unknown command 'man' (did you mean completion man?); commands: dump, "),
        ("web base --port 80", "tapscope web: unknown option --port (did you mean --listen?); see: "),
        ("ls base -n 3", "tapscope ls: unknown option -n (did you mean --limit?); see: "),
    ],
)
def test_cli_refuses_invalid_command_lines_in_one_sentence(
    line: str, said: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line.split()) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert streams.err.startswith(ERROR)
    assert streams.err.count("\n") == 1
    assert said in streams.err


@pytest.mark.parametrize(
    "require", ["rel < 1", "not nonfinite", "rel < 1 and max_abs < 2", "any((rel < 1, row < 2))", "0 < cosine <= 1"]
)
def test_diff_tolerance_accepts_a_condition_on_a_metric(
    require: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", "base", "good", "--rule", f".*={require}"]) == 0
    assert "\nwhy       everything satisfies the rules\n" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "# later\n", "rename: []\n", "rules:\n"])
def test_diff_refuses_an_empty_name_map(
    text: str, here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "map.yaml").write_text(text)
    assert main(["diff", "base", "good", "--map", str(tmp_path / "map.yaml")]) == 2
    assert "map.yaml has no entries: expected any of rename, split, join, dims, rules" in capsys.readouterr().err


def test_diff_of_a_run_with_itself_is_reported(here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "link").symlink_to(here / "base")
    assert main(["diff", "base", str(tmp_path / "link")]) == 0
    *_, what, _, why, _ = capsys.readouterr().out.splitlines()
    assert what == "what      agrees with itself"
    assert why == "why       baseline and target are the same directory"
    shutil.copytree("base", tmp_path / "copy")
    assert main(["diff", "base", str(tmp_path / "copy")]) == 0
    assert (
        "\nwhy       every compared value is equal, by recorded hash; --verify reads them\n" in capsys.readouterr().out
    )


def test_cli_suggests_a_nearby_run_directory(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", ".", "good"]) == 3
    assert ". is not a tapscope run: it contains 2 runs (base, good); give one of them" in capsys.readouterr().err
    assert main(["diff", "base/rank-00000", "good"]) == 3
    assert "base/rank-00000 is not a tapscope run: it is part of the run base" in capsys.readouterr().err


def test_info_of_a_folder_of_runs_does_not_read_other_tensor_files_below_it(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(here / "base", tmp_path / "one")
    (tmp_path / "checkpoint").mkdir()
    np.save(tmp_path / "checkpoint" / "weight.npy", np.zeros(4))
    for verb in ("info", "verify"):
        assert main([verb, str(tmp_path)]) in (2, 3)
        assert "it contains 1 run (one); give one of them" in capsys.readouterr().err, verb


FULL = f"{ERROR}the output cannot be written: No space left on device\n"
CLOSED = [
    (flags, *to)
    for flags in ("", "--json", "--all")
    for to in ((">&-", 0, ""), ("2>&-", 0, ""), (">/dev/full", 3, FULL))
]


@pytest.mark.parametrize(
    ("flags", "to", "code", "said"), mostly_soak(CLOSED, default=[*CLOSED[:3], CLOSED[3], CLOSED[5]])
)
def test_cli_survives_a_closed_stdout(here: Path, flags: str, to: str, code: int, said: str) -> None:
    done = shell(f"tapscope diff base good {flags} {to}")
    assert (done.returncode, done.stderr) == (code, said)


def test_cli_keeps_messages_for_a_closed_stderr_out_of_stdout(here: Path) -> None:
    done = shell("tapscope diff base nowhere --json 2>&-")
    assert (done.returncode, done.stdout) == (3, "")


@pytest.mark.parametrize("color", ["", "1"])
def test_diff_coloured_report_on_a_full_disk_is_an_error(here: Path, color: str) -> None:
    done = shell("tapscope diff base good >/dev/full", FORCE_COLOR=color)
    assert (done.returncode, done.stderr.count("\n")) == (3, 1)
    assert shell("tapscope --help >/dev/full").returncode == 3


@pytest.mark.parametrize("columns", mostly_soak(["abc", "-5", "0", "", "9" * 30, "٤٠"], default=["abc", "0", "9" * 30]))
def test_cli_ignores_an_invalid_columns_variable(here: Path, plain: str, columns: str) -> None:
    odd = shell("tapscope diff base good", COLUMNS=columns)
    assert (odd.returncode, odd.stdout, odd.stderr) == (0, plain, "")


@pytest.mark.parametrize("closed", ["", "run.json", "rank-00000", "rank-00000/records.jsonl"])
def test_cli_reports_unreadable_files(here: Path, tmp_path: Path, closed: str) -> None:
    as_anyone = "setpriv --bounding-set=-dac_override,-dac_read_search" if os.geteuid() == 0 else ""
    if as_anyone and not shutil.which("setpriv"):
        pytest.skip("root may read everything")
    run = tmp_path / "closed"
    shutil.copytree("good", run)
    (run / closed).chmod(0)
    try:
        done = subprocess.run(
            [*as_anyone.split(), sys.executable, "-m", "tapscope", "diff", "base", str(run)],
            capture_output=True,
            text=True,
            timeout=60,
        )
    finally:
        (run / closed).chmod(0o700)
    assert done.returncode == 3
    assert "Traceback" not in done.stderr
    assert ": Permission denied" in done.stderr


@pytest.mark.parametrize("name", ["diff_throughput", "floor_sweep", "cuda_capture"])
@pytest.mark.parametrize("way", ["-m benchmarks.{}", "benchmarks/{}.py"])
def test_benchmarks_run_as_modules_and_as_scripts(name: str, way: str) -> None:
    done = warm.run(*way.format(name).split(), "--help", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: ")


def test_diff_does_not_shorten_names_in_a_pipe(here: Path) -> None:
    piped, narrow = shell("tapscope diff base good --all"), shell("tapscope diff base good --all", COLUMNS="60")
    site = "model.layers.0.post_attention_layernorm:out"
    assert f"\n~ {site} " in piped.stdout
    assert site not in narrow.stdout
    assert narrow.stdout.splitlines()[-4:] == piped.stdout.splitlines()[-4:]


def test_info_counts_a_file_with_only_damaged_records(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree("good", tmp_path / "odd")
    with (tmp_path / "odd" / "rank-00000" / "records.jsonl").open("ab") as file:
        file.write(b"no line of ours\n" * 5000)
    assert main(["diff", "base", str(tmp_path / "odd")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("missing ") for line in lines) < 12
    assert any(line.endswith("records.jsonl: 4,992 more unreadable lines skipped") for line in lines)


def test_diff_counts_many_missing_sites_unless_all_are_requested(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in range(1, 4):
        shutil.copytree("good", tmp_path / "odd", dirs_exist_ok=True)
        (tmp_path / "odd" / f"rank-{rank:05d}").mkdir()
        (tmp_path / "odd" / f"rank-{rank:05d}" / "records.jsonl").write_bytes(b"no line of ours\n" * 20)
    for flags, num in (([], 13), (["--top", "3"], 4), (["--all"], 28)):
        main(["diff", "base", str(tmp_path / "odd"), *flags])
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("missing ")]
        assert len(lines) == num, lines
    assert main(["diff", "base", str(tmp_path / "odd")]) == 1
    assert "missing   16 more sentences like these; --all lists them" in capsys.readouterr().out


def test_diff_next_command_for_incompatible_shards_runs(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Toy(weights(layers=1), tp=2).write(tmp_path / "tp", prompts((6, 4))).close()
    given = [
        "--dims",
        "target:*.mlp.gate_proj:out=t h # tp:replicated",
        "--dims",
        "*_layernorm:out=t h # tp:replicated",
    ]
    assert main(["diff", "base", str(tmp_path / "tp"), *given]) == 1
    out = capsys.readouterr().out
    assert "\nwhat      model.layers.0.mlp.gate_proj (out) has another shape\n" in out
    command = shlex.split(out.splitlines()[-1].removeprefix("next"))
    fits = "target:model.layers.*.mlp.gate_proj:out=t h[tp]"
    assert command == ["tapscope", "diff", "base", str(tmp_path / "tp"), "--dims", fits, *given[2:]]
    assert main(command[1:]) == 0
    assert "\nwhat      agrees\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "env", "colours"),
    [
        ("--color always", {"NO_COLOR": "1"}, True),
        ("--color never", {"FORCE_COLOR": "1"}, False),
        ("", {"FORCE_COLOR": "1"}, True),
        ("", {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
        ("", {"FORCE_COLOR": "1", "NO_COLOR": ""}, True),
        ("", {}, False),
    ],
)
def test_color_option_overrides_environment(line: str, env: dict[str, str], colours: bool, here: Path) -> None:
    done = shell(f"tapscope diff base good --atol 0 {line}", **env)
    assert done.returncode == 1
    assert bool(re.search(r"^\x1b\[1;[349]\d[\d;]*m! ", done.stdout, re.MULTILINE)) == colours


@pytest.mark.parametrize(
    ("color", "given", "left"),
    [("always", "1", None), ("auto", "1", "1"), ("auto", "", None), ("never", None, "1"), ("auto", None, None)],
)
def test_color_option_sets_no_color(
    color: str, given: str | None, left: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", given or "")
    if given is None:
        monkeypatch.delenv("NO_COLOR")
    monkeypatch.setattr(output, "_color", color)
    output.settle_environment()
    assert os.environ.get("NO_COLOR") == left


def test_diff_refuses_a_checkpoint_directory(here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert main(["diff", "base", str(tmp_path)]) == 3
    assert f"it is a checkpoint; capture a run with: tapscope dump {tmp_path} -o RUN" in capsys.readouterr().err
    (tmp_path / "config.json").rename(tmp_path / "notes.txt")
    assert main(["diff", "base", str(tmp_path)]) == 3
    assert "capture a run with: tapscope dump MODEL -o RUN" in capsys.readouterr().err
