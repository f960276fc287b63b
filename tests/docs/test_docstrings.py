"""The examples in docstrings of the public API are executed."""

import inspect
import re
import runpy
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tapscope import Dumper, compare, open_run
from tapscope.bisect import bisect
from tapscope.comparator import CompareOptions
from tapscope.comparator.mismatch import mismatch
from tapscope.determinism import compare_bits
from tapscope.dumper import ctx
from tapscope.dumper.injection import Injector, StoredTensors
from tapscope.engine import LLM, SamplingParams
from tapscope.replay import replay
from tapscope.testing import assert_runs_close

ROOT = Path(__file__).resolve().parents[2]
NAMES = {
    each.__name__: each
    for each in (
        LLM,
        SamplingParams,
        Dumper,
        Injector,
        ctx,
        open_run,
        compare,
        mismatch,
        replay,
        bisect,
        compare_bits,
        assert_runs_close,
    )
}


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Yield the names used by the examples: a checkpoint, two equal runs, and one with another dtype."""
    folder = tmp_path_factory.mktemp("docstrings")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("path/to").mkdir(parents=True)
        runpy.run_path(str(ROOT / "examples/07_conversion.py"))["make_model"](Path("path/to/model"))
        model = AutoModelForCausalLM.from_pretrained("path/to/model").eval()
        ids = torch.arange(1, 9)[None]
        for out in ("reference", "target", "served", "run"):
            with torch.no_grad(), Dumper(model.bfloat16() if out == "served" else model.float(), out, keep="full"):
                model.generate(ids, max_new_tokens=3, do_sample=False, eos_token_id=None, pad_token_id=0)
        yield {**NAMES, "CompareOptions": CompareOptions, "StoredTensors": StoredTensors, "torch": torch} | {
            "model": model.float(),
            "ids": ids,
        }


@pytest.mark.parametrize("name", NAMES)
def test_docstring_example_runs(names: dict[str, Any], tmp_path: Path, name: str) -> None:
    (example,) = _examples(NAMES[name])
    example = example.replace('out="run"', f'out="{tmp_path / "run"}"')
    scope = dict(names)
    with torch.no_grad(), open_run("run") as scope["run"]:
        if name == "Injector":
            with Dumper(names["model"], tmp_path / "other", keep="off") as scope["dumper"], scope["dumper"].step():
                exec(example, scope)
        else:
            exec(example, scope)


def _examples(value: Any) -> list[str]:
    """Return the indented blocks after ``::``."""
    blocks = re.findall(r"^::\n\n((?: {4}.*\n|\n)+)", f"{inspect.getdoc(value)}\n", re.MULTILINE)
    return [textwrap.dedent(block) for block in blocks]
