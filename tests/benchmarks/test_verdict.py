"""Verdict bench: a consistent catalog, validated files, and the expected verdicts of a few cases."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_packages import ROOT, package

from tapscope import open_run
from tapscope.core.errors import UsageError

package()
catalogue: Any = importlib.import_module("benchmarks.verdict.catalogue")
main: Any = importlib.import_module("benchmarks.verdict.__main__")

GOOD = '''"""A bug."""
EXPECT = "model.norm"
VISIBILITY = "strong"


def patch(model):
    pass
'''


def bench(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, list[dict[str, Any]]]:
    """Run the bench; return its exit code and JSON lines."""
    code = main.main(["--json", *map(str, words)])
    return code, [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_catalogue_is_large_and_every_file_is_a_case() -> None:
    folder = ROOT / "benchmarks" / "verdict"
    bugs, benign = catalogue.load(folder / "bugs", bugs=True), catalogue.load(folder / "benign", bugs=False)
    assert len({case.name.partition("[")[0] for case in bugs}) >= 40
    assert len(benign) >= 40
    assert len({case.family for case in bugs}) >= 6
    assert {case.patches for case in bugs} >= {"transformers", "engine", "checkpoint"}
    assert len({case.name for case in [*bugs, *benign]}) == len(bugs) + len(benign)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD.replace('"""A bug."""', ""), "docstring"),
        (GOOD.replace("def patch(model)", "def other(model)"), "needs a function patch"),
        (GOOD.replace("patch(model)", "patch()"), "one argument"),
        (GOOD.replace('EXPECT = "model.norm"', ""), "needs EXPECT"),
        (GOOD.replace('"model.norm"', "3"), "EXPECT is 3"),
        (GOOD.replace("strong", "loud"), "strong or subtle"),
        (GOOD + "FAMILY = 'lama'\n", "families are llama"),
        (GOOD + "PATCHES = 'vllm'\n", "one of transformers, engine"),
        (GOOD + "TARGET = {'dtyp': 'bfloat16'}\n", "no 'dtyp'"),
        (GOOD + "TARGET = {'dtype': 'int3'}\n", "dtype='int3'"),
        (GOOD + "TARGET = {'engine': {'tp_size': 2}}\n", "needs framework='engine'"),
        (GOOD + "PATCHES = 'engine'\nTARGET = {'engine': {'pages': 2}}\n", "unknown engine setting 'pages'"),
        (GOOD + "MODEL = {'weights': 'light'}\n", "must be one of spread, heavy"),
        (GOOD + "MODEL = {'hidden': 32}\n", "LlamaConfig has no 'hidden'"),
        (GOOD + "TARGETS = {}\n", "valid settings: FAMILY"),
        (GOOD + "WHERE = {'token': 3}\n", "valid fields: step"),
        (GOOD + "CAUSE = '(scale'\n", "regular expression"),
        (GOOD + "1 / 0\n", "ZeroDivisionError"),
        ("def broken(:\n", "SyntaxError"),
    ],
)
def test_catalogue_bad_file_is_one_clear_error(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(UsageError, match=message) as raised:
        catalogue.load(tmp_path, bugs=True)
    assert "mine.py" in str(raised.value)


def test_catalogue_refuses_an_empty_or_missing_folder(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(UsageError, match=r"no case file|not a directory"):
            catalogue.load(folder, bugs=True)


def test_verdict_names_a_user_bug_and_refuses_cases_that_prove_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "good.py").write_text(GOOD.replace("pass", "model.model.norm.weight.data[3] *= -2"))
    (tmp_path / "idle.py").write_text(GOOD)
    (tmp_path / "raises.py").write_text(GOOD.replace("pass", "model.nothing.here = 1"))
    code, lines = bench(capsys, "--bugs", tmp_path)
    scores = {line["name"]: line["score"] for line in lines if line["type"] == "case"}
    assert scores == {"good": "named", "idle": "faulty", "raises": "faulty"}
    assert code == 1, "a faulty case is not a success"


def test_verdict_cause_is_right_wrong_or_not_stated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scaled = GOOD.replace("pass", "model.model.norm.weight.data *= 1.5") + "CAUSE = {}\n"
    (tmp_path / "right.py").write_text(scaled.format(r"r'target = 1\.5 × BASELINE'"))
    (tmp_path / "wrong.py").write_text(scaled.format("['bias', 'eps']"))
    unclear = GOOD.replace('"""A bug."""', '"""A bug."""\nimport torch') + "CAUSE = 'eps'\n"
    after = "from benchmarks.verdict.tools import after\nafter(model.model.norm, lambda y: y + torch.rand_like(y))"
    (tmp_path / "none.py").write_text(unclear.replace("    pass", "    " + after.replace("\n", "\n    ")))
    _, lines = bench(capsys, "--bugs", tmp_path)
    assert {line["name"]: line["cause_score"] for line in lines[:-1]} == {
        "right": "right",
        "wrong": "wrong",
        "none": "none",
    }
    assert "causes of 3 named strong bugs: 1 right (33%), 1 wrong, 1 not stated" in lines[-1]["lines"]


def test_catalogue_every_strong_bug_has_a_cause() -> None:
    bugs = catalogue.load(ROOT / "benchmarks" / "verdict" / "bugs", bugs=True)
    assert [case.name for case in bugs if case.visibility == "strong" and not case.cause] == []


def test_catalogue_case_may_set_size_weights_and_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(
        '"""Mine."""\nMODEL = [{"num_hidden_layers": 2, "weights": style} for style in ("heavy", "wide")]\n'
        'BOTH = {"workload": "shared", "greedy": True}\n'
        'TARGET = {"framework": "engine", "page_size": 4, "engine": {"max_num_batched_tokens": 7}}\n'
    )
    code, (heavy, wide, _) = bench(capsys, "--benign", tmp_path)
    assert (code, heavy["score"], wide["score"]) == (0, "clean", "clean")
    assert heavy["name"] == "mine[num_hidden_layers=2 heavy]"
    assert wide["model"] == {"family": "llama", "style": "wide", "seed": 0, "sizes": [["num_hidden_layers", 2]]}


@pytest.mark.parametrize("style", ["spread", "heavy", "normal", "wide"])
def test_catalogue_weights_depend_only_on_the_seed(tmp_path: Path, style: str) -> None:
    models: Any = importlib.import_module("benchmarks.verdict.models")
    stored = []
    for seed in (0, 0, 1):
        folder = models.Model.of("gemma2", {"weights": style, "seed": seed, "num_hidden_layers": 1}).save(tmp_path)
        stored.append((folder / "model.safetensors").read_bytes())
    assert stored[0] == stored[1] != stored[2]


def test_verdict_of_a_few_catalogue_cases(capsys: pytest.CaptureFixture[str]) -> None:
    names = ("rope_theta[same]", "shard_row_zeroed[engine tp=2 bfloat16]", "engine_kv_off_by_one[transformers]")
    benign = ("dtype[llama,bfloat16]", "engine_tp2[llama,engine tp=2 bfloat16]")
    code, lines = bench(capsys, *(word for name in (*names, *benign) for word in ("--only", name)))
    scores = {line["name"]: line["score"] for line in lines if line["type"] == "case"}
    assert scores == dict.fromkeys(names[:2], "named") | {names[2]: "ancestor"} | dict.fromkeys(benign, "clean")
    assert code == 0


def test_verdict_unknown_case_name_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["--only", "no_such_bug"]) == 2
    out, err = capsys.readouterr()
    assert (out, "no_such_bug" in err) == ("", True)


def test_verdict_counts_skipped_gpu_cases(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main.main(["--only", "engine_no_all_reduce*", "--only", "norm_eps*", "--device", "cuda"]) == 2
    error = capsys.readouterr().err
    assert "no case is left to run; left out:" in error
    assert "cases that do not fit one GPU" in error
    assert "cases that need CUDA, which is not available" in error


def test_verdict_engine_run_has_model_config(tmp_path: Path) -> None:
    models: Any = importlib.import_module("benchmarks.verdict.models")
    run_engine: Any = importlib.import_module("benchmarks.verdict.run_engine").run_engine
    setup: Any = importlib.import_module("benchmarks.verdict.setup").Setup
    checkpoint = models.Model.of("deepseek-v3", {"num_hidden_layers": 2}).save(tmp_path / "checkpoint")
    run_engine(checkpoint, setup(framework="engine", workload="token"), tmp_path / "run")
    with open_run(tmp_path / "run") as run:
        assert {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 3}.items() <= run.model_config.items()


def test_verdict_seeds_of_a_commit_are_its_first_digits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["--seeds-of", "72d6ed050464237efc527813a582bf640ca565d7"]) == 0
    assert capsys.readouterr().out == "7526125 328804 2326268\n"
