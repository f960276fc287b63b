"""The text of tokens in a report: by the run's tokenizer, by that of --tokenizer, and without one."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from compare_runs import diff
from factories import RunFactory
from tokenizers import Tokenizer, models
from tokenizers.decoders import ByteLevel

from tapscope.cli import main
from tapscope.comparator.report.answer import answer
from tapscope.core.errors import ConfigError, MissingExtraError
from tapscope.core.observe import RowSpan

WORDS = ["The", "Ġcapital", "Ċ", "Ġof", "Ã", "[0m"]
"""Of a byte-level vocabulary; the fifth is half of a character."""
IDS = [0, 1, 2, 3, 4, 5, 77]
TOKENS = ("'The'", "' capital'", r"'\n'", "' of'", "'Ã'", "'[0m'", "")


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A directory with a tokenizer.json."""
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="The"))
    made.decoder = ByteLevel()
    (tmp_path / "model").mkdir()
    made.save(str(tmp_path / "model" / "tokenizer.json"))
    return tmp_path / "model"


def write(path: Path, values: np.ndarray, *, model: Path | str = "", ids: list[int] | None = None) -> Path:
    with RunFactory(path, **({"model": str(model)} if model else {})) as run:
        run.step(grid=(len(IDS),), rows=[RowSpan("a", 0, len(IDS), 0, 0)], token_ids=ids or IDS)
        run.put("layers.0.mlp:in[x]", np.ones((len(IDS), 4), np.float32), dims="t h")
        run.put("layers.0.mlp:out", values, dims="t h")
    return path


def runs(path: Path, row: int, model: Path | str = "") -> tuple[Path, Path]:
    values = np.ones((len(IDS), 4), np.float32)
    wrong = values.copy()
    wrong[row] = 3.0
    return write(path / "b", values, model=model), write(path / "t", wrong, model=model)


@pytest.mark.parametrize("row", range(len(IDS)))
def test_token_text_of_the_runs_model_is_in_the_answer(tmp_path: Path, tokenizer: Path, row: int) -> None:
    report = diff(*runs(tmp_path, row, tokenizer))
    assert report.first_divergence is not None
    place = report.first_divergence.place
    assert place is not None
    assert (place.position, place.token_id) == (row, IDS[row])
    shown = f"position {row} ({TOKENS[row]})" if TOKENS[row] else f"position {row}"
    assert place.text() == f"request a, {shown}"
    assert f"{shown}, column" in answer(report)[1]
    assert report.first_divergence.tokens[0].place == place


def test_token_text_by_flag_is_in_the_json_line(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = runs(tmp_path, 3)
    assert main(["diff", str(one), str(two), "--json", "--tokenizer", str(tokenizer / "tokenizer.json")]) == 1
    place = json.loads(capsys.readouterr().out.splitlines()[-1])["first_divergence"]["place"]
    assert (place["token_id"], place["token_text"]) == (3, " of")


def test_token_text_of_a_fork_names_both_tokens(tmp_path: Path, tokenizer: Path) -> None:
    values = np.ones((len(IDS), 4), np.float32)
    report = diff(
        write(tmp_path / "b", values), write(tmp_path / "t", values, ids=[0, 1, 2, 5, 4, 5, 6]), tokenizer=tokenizer
    )
    assert [(fork.baseline_text, fork.target_text) for fork in report.coverage.forks] == [(" of", "[0m")]


def test_token_text_is_left_out_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_text("[]")
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "tokenizer.json")
    for i, model in enumerate(("some/model", tmp_path / "model", tmp_path / "pipe")):
        report = diff(*runs(tmp_path / str(i), 2, model))
        assert report.first_divergence is not None
        assert report.first_divergence.place is not None
        assert report.first_divergence.place.text() == "request a, position 2"


@pytest.mark.parametrize("name", ["absent", "bad"])
def test_token_text_with_an_invalid_tokenizer_is_one_sentence(tmp_path: Path, name: str) -> None:
    (tmp_path / "bad").write_text("{}")
    with pytest.raises(ConfigError, match=r"--tokenizer .*: expected a tokenizer.json, or a directory with one"):
        diff(*runs(tmp_path, 2), tokenizer=tmp_path / name)


def test_token_text_without_the_package_names_the_extra(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    one, two = runs(tmp_path, 2, tokenizer)
    assert diff(one, two).exit_code == 1, "not needed without the option"
    with pytest.raises(MissingExtraError, match=r"decoding tokens needs tokenizers.*tapscope\[engine\]"):
        diff(one, two, tokenizer=tokenizer)
