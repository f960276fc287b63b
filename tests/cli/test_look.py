"""`ls`, `show`, `info` and `view` through main, on a run on disk."""

import json
import os
import pty
import re
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from dashboard_runs import toy_run
from factories import RunFactory

from tapscope import cli
from tapscope.core.errors import DataError, RunCorruptError
from tapscope.sources import open_run

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return toy_run(tmp_path_factory.mktemp("look") / "base")


@pytest.fixture
def here(base, monkeypatch):
    """Change to the directory of the run, so that output contains no machine-specific path."""
    monkeypatch.chdir(base.parent)
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def run_cli(capsys, here):
    """Return a function that runs a command line and returns exit code, stdout and stderr."""

    def run(*words):
        code = cli.main(list(words))
        out = capsys.readouterr()
        return code, out.out, out.err

    return run


def check_golden(name, text):
    """Compare with tests/golden; TAPSCOPE_UPDATE_GOLDEN=1 accepts the current output."""
    file = GOLDEN / f"{name}.txt"
    if os.environ.get("TAPSCOPE_UPDATE_GOLDEN") == "1":
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    assert text == file.read_text()


def objects(out):
    return [json.loads(line) for line in out.splitlines()]


GOLDENS = {
    "ls_step": (["ls", "base", "--steps", "1", "--ranks", "0", "--layers", "2"], 0),
    "ls_max": (["ls", "base", "--site", "layers.*.o_proj:out", "--sort", "max", "--limit", "3"], 0),
    "ls_odd": (["ls", "base", "--anomalies"], 0),
    "show_bad": (["show", "base", "model.layers.2.self_attn.o_proj:out", "--step", "1"], 0),
    "show_stats_only": (["show", "base", "model.layers.1:out", "--step", "3"], 0),
    "show_slice": (["show", "base", "model.norm:out", "--step", "0", "--slice", "1::2,-4:"], 0),
    "info": (["info", "base"], 1),
}


@pytest.mark.parametrize("name", GOLDENS)
def test_verbs_print_the_golden_text(name, run_cli):
    words, expected = GOLDENS[name]
    code, out, err = run_cli(*words)
    assert code == expected
    check_golden(f"look_{name}", f"{out}--- stderr\n{err}")


def test_ls_prints_one_line_per_record_and_json_agrees(run_cli, base):
    _, text, _ = run_cli("ls", "base")
    _, lines, err = run_cli("ls", "base", "--json")
    records = open_run(base).records
    assert len(text.splitlines()) == len(records) + 1
    found = objects(lines)
    assert len(found) == len(records)
    assert {(line["type"], line["schema"]) for line in found} == {("record", "tapscope.ls/2")}
    assert err == ""
    for row, line in zip(text.splitlines()[1:], found, strict=True):
        assert line["site"] in row.split()


def test_ls_reports_records_omitted_by_a_limit(run_cli):
    code, out, err = run_cli("ls", "base", "--limit", "5")
    assert code == 0
    assert len(out.splitlines()) == 6
    assert err == "187 more records; --limit 192 lists them all\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--site", "layers.99.*"], "no site matches 'layers.99.*' in base; layers are 0-3 (see: tapscope ls base)"),
        (["--skip", "nothing"], "no site matches 'nothing' in base"),
        (["--site", ""], "an empty pattern selects nothing"),
        (["--layers", "7"], "no record of base matches all selection flags; layers are 0-3"),
        (["--layers", "one"], "--layers: 'one' is not a list of numbers; write e.g. 0-3,27"),
        (["--steps", "9"], "no step 9 in base; steps are 0-3"),
        (["--ranks", "0,5-6"], "no rank 5-6 in base; ranks are 0-1"),
        (["--limit", "0"], "--limit 0: must be at least 1"),
    ],
)
def test_ls_without_a_match_names_existing_sites(run_cli, words, message):
    code, out, err = run_cli("ls", "base", *words)
    assert (code, out) == (2, "")
    assert err.startswith("tapscope: error: ")
    assert message in err


def test_ls_reports_an_empty_run(tmp_path, capsys):
    with RunFactory(tmp_path / "new") as run:
        run.step()
    assert cli.main(["ls", str(tmp_path / "new")]) == 0
    assert capsys.readouterr().err == f"{tmp_path / 'new'} has no records yet\n"


@pytest.mark.parametrize("verb", ["ls", "info"])
def test_missing_run_is_a_data_error(run_cli, verb):
    code, out, err = run_cli(verb, "nowhere")
    assert (code, out) == (3, "")
    assert "nowhere is not a tapscope run: it does not exist" in err


def test_show_of_several_records_lists_them_and_how_to_choose(run_cli):
    code, out, err = run_cli("show", "base", "layers.*.o_proj:out")
    assert code == 0
    assert out.startswith("model.layers.0.self_attn.o_proj:out   step 0 prefill · rank 0\n")
    assert err.startswith(
        "32 records match; shown: model.layers.0.self_attn.o_proj:out --step 0 --rank 0 --occurrence 0"
    )
    code, out, err = run_cli("show", "base", "model.norm:out", "--step", "2")
    assert (code, err) == (0, "")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["model.norm:out", "--step", "9"],
            "model.norm:out has no record with --step 9 in base; it has steps 0-3, rank 0",
        ),
        (["model.nrm:out"], "no site matches 'model.nrm:out' in base; model contains embed_tokens, layers, norm"),
        (["model.layers.9:out"], "no site matches 'model.layers.9:out' in base; layers are 0-3"),
        (["model.norm:ot"], "no site matches 'model.norm:ot' in base; model.norm has out"),
        (["model.norm:out", "--slice", "x"], "--slice 'x': invalid index 'x'; examples: 0, :8, 2:10:2, ..."),
        (["model.norm:out", "--slice", "0,0,0"], "--slice '0,0,0' has 3 indices but the tensor has 2 axes"),
        (["model.norm:out", "--slice", "99"], "--slice '99' is out of range for shape 7×64"),
        (["model.norm:out", "--slice", "...,..."], "'...' may be used once"),
        (["model.norm:out", "--slice", "::0"], "invalid index '::0'"),
    ],
)
def test_show_without_a_match_names_existing_sites(run_cli, words, message):
    code, out, err = run_cli("show", "base", *words)
    assert (code, out) == (2, "")
    assert message in err


def test_show_slice_of_statistics_only_is_a_data_error(run_cli):
    code, _, err = run_cli("show", "base", "model.layers.1:out", "--step", "0", "--slice", "0")
    assert code == 3
    assert "kept as statistics only" in err


@pytest.mark.parametrize("index", ["0", "0,:8", "...,-1", "2:5,::16", "-1,-1", ":0", "..."])
def test_show_slice_json_equals_numpy(run_cli, base, index):
    code, out, _ = run_cli("show", "base", "model.norm:out", "--step", "0", f"--slice={index}", "--json")
    with open_run(base) as run:
        array = run.array(run.select(["model.norm:out"], steps=[0])[0]).astype(np.float64)
    assert code == 0
    assert objects(out)[0]["values"] == eval_index(array, index).tolist()


def eval_index(array, text):
    """Return the index as NumPy interprets it."""
    parts = []
    for part in text.split(","):
        numbers = [int(n) if n else None for n in part.split(":")] if part != "..." else []
        parts.append(... if part == "..." else numbers[0] if ":" not in part else slice(*numbers))
    return array[tuple(parts)]


def test_show_slice_prints_row_coordinates_and_reports_omitted_values(tmp_path, capsys):
    with RunFactory(tmp_path / "r") as run:
        run.step()
        run.put("m:out", np.arange(300.0).reshape(100, 3))
    assert cli.main(["show", str(tmp_path / "r"), "m:out", "--slice", "10:,1:"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[1].split() == ["[10,:]", "31", "32"]
    assert len(out.splitlines()) == 65
    assert err == "26 more rows of the slice; --json prints all\n"


def test_show_plot_is_the_heat_map_and_the_site_over_steps(run_cli):
    code, out, _ = run_cli("show", "base", "model.layers.2.self_attn.o_proj:out", "--step", "1", "--plot")
    lines = out.splitlines()
    assert code == 0
    assert lines[1].startswith("largest |x|, 2 × 64 cells of 2 × 64 values")
    assert [line.rpartition(" ")[2].count("%") for line in lines[2:4]] == [0, 2]  # columns 7 and 9 of the second row
    assert lines[3].rpartition(" ")[2][7] == "%"
    rms = next(line for line in lines if line.startswith("rms rank 0"))
    assert rms.split()[3] == "█%██"
    assert rms.endswith("not finite in 1 of 4 steps")
    code, out, _ = run_cli("show", "base", "model.layers.2:out", "--plot")
    assert "no values were kept" in out
    assert "|max| rank 0" in out


@pytest.mark.parametrize("flags", [("--plot", "--json"), ("--plot", "--html", "a.html"), ("--slice", "0", "--plot")])
def test_show_prints_one_form_only(run_cli, flags):
    code, _, err = run_cli("show", "base", "lm_head:out", *flags)
    assert code == 2
    assert "exclude each other" in err


def test_show_json_carries_histogram_and_first_nonfinite(run_cli):
    _, out, _ = run_cli("show", "base", "model.layers.2.self_attn.o_proj:out", "--step", "1", "--rank", "0", "--json")
    line = objects(out)[0]
    assert (line["type"], line["schema"]) == ("tensor", "tapscope.show/1")
    assert line["first_nonfinite"] == [1, 7]
    assert sum(line["histogram"]["counts"]) == 126


def test_info_json_agrees_with_text(run_cli):
    code, out, err = run_cli("info", "base", "--json")
    assert (code, err) == (1, "")
    lines = objects(out)
    assert all(line["schema"] == "tapscope.info/2" for line in lines)
    run = lines[0]
    assert (run["num_records"], run["num_with_values"], run["world_size"]) == (192, 176, 2)
    assert {line["site"] for line in lines if line["type"] == "anomaly"} == {
        "lm_head:out",
        "model.layers.2.self_attn.o_proj:out",
    }
    metric = next(line for line in lines if line["type"] == "metric")
    assert (metric["name"], metric["mean"], metric["num_steps"]) == ("latency_s", 0.625, 4)
    assert lines[-1] == {
        "type": "summary",
        "schema": "tapscope.info/2",
        "complete": True,
        "anomalous_sites": 2,
        "missing": [],
    }


def test_info_of_a_healthy_run_exits_0_and_verify_reads_every_payload(tmp_path, capsys):
    path = tmp_path / "fine"
    with RunFactory(path) as run:
        run.step()
        run.put("m:out", np.arange(6.0).reshape(2, 3))
        run.put("attn:in[mask]", np.full((2, 2), -np.inf))
    assert cli.main(["info", str(path), "--verify"]) == 0
    assert "verified   2 payloads match their recorded hash\n" in capsys.readouterr().out
    flip_a_byte(path)
    assert cli.main(["info", str(path), "--verify"]) == 3
    assert "corrupt    m:out at step 0, rank 0: its bytes have hash" in capsys.readouterr().out
    assert cli.main(["info", str(path), "--verify", "--json"]) == 3
    assert len(objects(capsys.readouterr().out)[-1]["damaged"]) == 1


def flip_a_byte(path):
    record = next(r for r in open_run(path).records if r.key.site == "m:out")
    segment = path / "rank-00000" / record.entry.file
    content = bytearray(segment.read_bytes())
    content[record.entry.offset + 9] ^= 1
    segment.write_bytes(content)


def test_info_of_an_incomplete_run_exits_1_and_names_what_is_missing(tmp_path, capsys):
    path = tmp_path / "part"
    with RunFactory(path, mesh={"tp": 2}) as run:
        run.step()
        run.put("m:out", {0: np.ones(4), 1: np.ones(4)})
        run.writers[0].event("config", epoch=3, step=1)
        for counts in run._counts.values():
            counts.dropped = 2
            counts.seen += 2
    assert cli.main(["info", str(path)]) == 1
    out = capsys.readouterr().out
    assert "complete   NO; 4 values dropped (the pipeline was full, or the recorder had ended)\n" in out
    assert "events     config  rank 0  epoch=3 step=1\n" in out
    assert "anomalies  none: no site holds NaN, infinity or only zeros\n" in out


def test_show_and_info_count_non_tensor_values(tmp_path, capsys):
    path = tmp_path / "values"
    with RunFactory(path) as run:
        run.step()
        run.put("m:out", np.arange(4.0))
        record = {"type": "record", "seq": 9, "site": "m:in[use_cache]", "step": 0}
        run.writers[0].line({**record, "value": {"type": "bool", "value": True}})
        run.writers[0].line({**record, "seq": 10, "site": "m:in[cache]", "value": {"type": "object", "class": "a.B"}})
        run.writers[0].line(
            {**record, "seq": 11, "site": "m:in[text]", "value": {"type": "str", "value": "x\n", "cut": 9000}}
        )
    assert cli.main(["info", str(path)]) == 0
    assert "records    4: 1 with values (32 B), 3 non-tensors\n" in capsys.readouterr().out
    assert cli.main(["show", str(path), "m:in[use_cache]"]) == 0
    out = capsys.readouterr().out
    assert "not a tensor: bool True\n" in out
    assert "Not a tensor" in out
    assert cli.main(["show", str(path), "m:in[cache]"]) == 0
    assert "not a tensor: object a.B, only the class was recorded\n" in capsys.readouterr().out
    assert cli.main(["show", str(path), "m:in[text]"]) == 0
    assert "not a tensor: str 'x\\n' (first 2 of 9,000 characters)\n" in capsys.readouterr().out


def test_info_does_not_report_non_tensor_values_as_damage(tmp_path):
    path = tmp_path / "values"
    with RunFactory(path) as run:
        run.step()
        line = {"type": "record", "seq": 0, "site": "m:in[cache]", "step": 0}
        run.writers[0].line({**line, "value": {"type": "object", "class": "DynamicCache"}})
    with open_run(path) as run, pytest.raises(DataError) as caught:
        run.array(run.records[0])
    assert str(caught.value) == "m:in[cache] at step 0 is not a tensor: DynamicCache"
    assert not isinstance(caught.value, RunCorruptError)


def test_info_of_many_separate_steps_abbreviates_them(tmp_path, capsys):
    path = tmp_path / "sparse"
    with RunFactory(path) as run:
        for step in range(100):
            run.step(phase="decode" if step % 2 else "prefill")
            run.put("m:out", {0: np.ones((2, 2), np.float32)})
    assert cli.main(["info", str(path)]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("steps")]
    assert line.split(None, 1)[1] == "100: 50 prefill (0,2,4,6,8,10,12,…,98), 50 decode (1,3,5,7,9,11,13,…,99)"


def test_show_of_a_module_shows_its_output(run_cli):
    code, out, err = run_cli("show", "base", "*.layers.1.self_attn.o_proj:*")
    assert code == 0
    assert out.startswith("model.layers.1.self_attn.o_proj:out   step 0")
    assert "model.layers.1.self_attn.o_proj:in[input]" in err  # listed as a choice


def test_info_needs_a_run_or_env(run_cli):
    code, _, err = run_cli("info")
    assert code == 2
    assert "tapscope info RUN, or tapscope info --env" in err


def test_info_env_names_versions_and_the_native_backend_without_loading_torch(base):
    program = (
        "import sys; from tapscope.cli import main; code = main(['info', '--env']); "
        "print(sorted({'torch', 'textual', 'transformers', 'zmq', 'fastapi'} & set(sys.modules)), code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[-1] == "[] 0"
    names = [line.split("  ")[0] for line in lines[:-1]]
    assert names[:3] == ["tapscope", "python", "platform"]
    assert {"torch", "transformers", "textual", "pyzmq", "native kernels"} <= set(names)


@pytest.mark.parametrize("words", [["ls", "base"], ["show", "base", "model.norm:out"], ["info", "base"]])
def test_reading_verbs_load_neither_torch_nor_textual(here, words):
    program = (
        "import sys; from tapscope.cli import main; main(sys.argv[1:]); "
        "print(sorted({'torch', 'textual', 'polars', 'zmq'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "[]"


@pytest.mark.parametrize("verb", ["ls", "show", "info", "view"])
def test_help_is_light_and_begins_with_the_summary(verb):
    program = (
        "import sys; from tapscope.cli import main; main(sys.argv[1:]); "
        "print(sorted({'torch', 'textual', 'polars', 'numpy', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program, verb, "--help"], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert f"usage: tapscope {verb}" in done.stdout


@pytest.mark.parametrize("verb", cli.VERBS)
def test_help_of_every_verb_is_uniform_and_its_examples_parse(verb, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main([verb, "--help"]) == 0
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if len(line) > 80] == []
    first, *rest = out.partition("\n\n")[2].splitlines()
    assert first[0].isupper()
    assert first.endswith(".")
    examples = [line for line in rest if re.match(r" *(\$|tapscope|curl|python) ", line)]
    assert examples
    for example in examples:
        assert example.startswith("  $ "), example
        call = re.split(r"   +| [|>] ", example.removeprefix("  $ "))[0]  # the rest is a description
        program, name, *words = shlex.split(call)
        if program == "tapscope":
            found = cli.VERBS[name]
            command = getattr(import_module(f"tapscope.cli.{found.module}"), found.cls)()
            assert cli._parser(name, command).parse_intermixed_args(words), example


def test_view_with_stderr_redirected_is_refused_rather_than_blank(here):
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "tapscope", "view", "base"]
    done = subprocess.run(command, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(ours)
    os.close(theirs)
    assert (done.returncode, done.stderr) == (
        2,
        "tapscope: error: view draws on stderr, which is redirected; start it without 2>\n",
    )


def test_view_without_a_terminal_names_the_other_commands(run_cli):
    code, out, err = run_cli("view", "base")
    assert (code, out) == (2, "")
    assert (
        err == "tapscope: error: view requires a terminal; without one, use: tapscope info base, or tapscope ls base\n"
    )
    for words in (["localhost:7000"], ["--live", "7000"], ["--live", "base"]):
        assert run_cli("view", *words)[2].endswith(f"use: tapscope ctl {words[-1]} state --table\n")
    assert run_cli("view", "base", "my run")[2].endswith("use: tapscope diff base 'my run'\n")


def test_view_without_textual_says_how_to_install_it(run_cli, monkeypatch):
    from tapscope.core import extras

    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    code, _, err = run_cli("view", "base")
    assert code == 2
    assert "pip install 'tapscope[tui]'" in err
