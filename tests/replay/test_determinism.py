"""Determinism check: bit-equal runs pass, and the first differing value of unequal runs is named."""

import json
import sys
import textwrap

import forkserver_pool as warm
import pytest
import torch
from checkpoints import make_llama
from torch import nn

from tapscope.cli import main
from tapscope.core.errors import DataError
from tapscope.determinism import compare_bits
from tapscope.dumper import Dumper
from tapscope.sources import open_run


def capture(out, x, *, calls=(0, 1), **settings):
    model = nn.Sequential(nn.Identity(), nn.ReLU())
    with torch.no_grad(), Dumper(model, out, **({"keep": "stats"} | settings)) as dumper:
        for step in calls:
            with dumper.step():
                model(x[step])
    return out


def compare(one, two):
    with open_run(one) as first, open_run(two) as second:
        return [(each.site, each.step, each.reason) for each in compare_bits(first, second)]


def test_equal_bits_pass_with_and_without_values(tmp_path):
    x = torch.tensor([[1.0, float("nan")], [float("inf"), -0.0]])
    assert compare(capture(tmp_path / "a", x), capture(tmp_path / "b", x, keep="full")) == []


def test_values_that_are_equal_as_numbers_but_not_in_bits_are_found(tmp_path):
    one = capture(tmp_path / "a", torch.tensor([[1.0], [0.0]]))
    two = capture(tmp_path / "b", torch.tensor([[1.0], [-0.0]]))
    found = compare(one, two)
    assert found[0][1:] == (1, "bits")
    assert {"0:out", "1:in[input]"} <= {site for site, _, _ in found}
    assert all(step == 1 for _, step, _ in found)


def test_shape_dtype_and_missing_steps_are_found(tmp_path):
    one = capture(tmp_path / "a", torch.zeros(2, 2), rules=["0:out=stats"])
    assert compare(one, capture(tmp_path / "b", torch.zeros(2, 3)))[0][2] == "shape"
    assert compare(one, capture(tmp_path / "c", torch.zeros(2, 2).double()))[0][2] == "dtype"
    found = compare(one, capture(tmp_path / "d", torch.zeros(2, 2), calls=(0,)))
    assert {(step, reason) for _, step, reason in found} == {(1, "tokens"), (1, "only_first")}


def test_step_of_the_second_run_alone_is_found_without_records(tmp_path):
    x = torch.zeros(2, 2)
    one = capture(tmp_path / "a", x, calls=(0,), rules=["*=off steps=1-"])
    two = capture(tmp_path / "b", x, calls=(0, 1), rules=["*=off steps=1-"])
    assert compare(one, two) == compare(two, one) == [("tokens", 1, "tokens")]


def test_incomplete_run_is_refused(tmp_path):
    x = torch.zeros(2, 2)
    one = capture(tmp_path / "a", x)
    with pytest.raises(DataError, match="a budget ended the capture"):
        compare(one, capture(tmp_path / "b", x, max_records=1))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_llama(tmp_path_factory.mktemp("models") / "llama")


def test_command_reports_a_model_as_bit_equal(llama, capsys):
    words = ["check-determinism", str(llama), "--prompt", "ab", "--max-new-tokens", "2", "-q"]
    assert main([*words, "--runs", "3", "--site", "lm_head:out"]) == 0
    assert capsys.readouterr().out == "what      bit-equal: 2 values of 2 steps in 3 runs\n"


PROGRAM = """
import torch
from torch import nn
from tapscope import dumper

class Noise(nn.Module):
    def forward(self, x):
        return x + 1e-6 * torch.randn_like(x)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), Noise(), nn.Linear(4, 4))
dumper.attach(model)
torch.seed()
for _ in range(2):
    with torch.no_grad():
        model(torch.ones(2, 4))
    dumper.step()
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    file = tmp_path_factory.mktemp("program") / "program.py"
    file.write_text(textwrap.dedent(PROGRAM))
    return [str(warm.commands() / "python"), str(file)]


def test_command_names_the_first_module_that_is_not_deterministic(program, tmp_path, capsys):
    words = ["check-determinism", "-q", "--json", "-o", str(tmp_path / "kept"), "--command", *program]
    assert main(words) == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[-1]["first"] | {"micro": 0} == {
        "site": "1:out", "step": 0, "rank": 0, "reason": "bits", "occurrence": 0, "micro": 0, "pass_": "forward",
    }  # fmt: skip
    assert lines[-1]["num_unequal"] == len(lines) - 1
    assert (tmp_path / "kept" / "run-2" / "run.json").is_file()
    assert main(words) == 2  # the runs already exist
    assert "already holds a run" in capsys.readouterr().err


def test_command_refuses_a_failed_or_silent_program(capsys):
    words = ["check-determinism", "-q", "--command", sys.executable, "-c"]
    assert main([*words, "raise SystemExit(7)"]) == 3
    assert "run 1 of the command exited with code 7" in capsys.readouterr().err
    assert main([*words, "print(1)"]) == 3
    assert "the command recorded nothing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "give MODEL and --prompt, or --command"),
        (["model", "--command", "true"], "give MODEL and --prompt, or --command"),
        (["model", "--runs", "1"], "--runs 1: must be at least 2"),
        (["--prompt", "x", "--command", "true"], "--command determines the prompts"),
        (["--command", "no-such-program"], "--command no-such-program: No such file"),
        (["model", "--keep", "full"], "give -o DIR"),
    ],
)
def test_command_rejects_wrong_use(words, text, capsys):
    assert main(["check-determinism", *words]) == 2
    assert text in capsys.readouterr().err
