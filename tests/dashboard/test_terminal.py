"""`tapscope view` in a real terminal: a pseudo-terminal of the standard library."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from comparator_toy import Toy, weights
from dashboard_runs import toy_run
from terminal_driver import drain_until_exit, read_until
from terminal_driver import terminal as terminal

from tapscope.cli import main


def test_view_draws_a_site_and_exits_0_on_q(terminal, tmp_path):
    fd, start = terminal
    process = start("view", str(toy_run(tmp_path / "base")))
    read_until(fd, b"model.embed_tokens:out", process)
    os.write(fd, b"q")
    assert drain_until_exit(fd, process) == 0


def test_view_of_two_runs_draws_the_culprit_and_exits_0_on_q(terminal, tmp_path):
    fd, start = terminal
    tables = weights()
    Toy(tables).write(tmp_path / "base", {"0": list(range(3, 12))}).close()
    damage = {"model.layers.1.mlp.up_proj:out": lambda values: values * 1.2}
    Toy(tables, hooks=damage).write(tmp_path / "target", {"0": list(range(3, 12))}).close()
    process = start("view", str(tmp_path / "base"), str(tmp_path / "target"), "--skip", "lm_head:*")
    read_until(fd, b"model.layers.1.mlp.up_proj:out", process)
    os.write(fd, b"q")
    assert drain_until_exit(fd, process) == 0


@pytest.mark.soak
def test_a_link_of_the_html_report_leads_to_the_value_in_less_than_a_minute(terminal, tmp_path):
    fd, start = terminal
    base, target = (str(tmp_path / name) for name in ("base", "target"))
    tables = weights()
    Toy(tables).write(Path(base), {"0": list(range(3, 12))}).close()
    damage = {"model.layers.1.mlp.up_proj:out": lambda values: values * 1.2}
    Toy(tables, hooks=damage).write(Path(target), {"0": list(range(3, 12))}).close()
    begun = time.monotonic()
    assert main(["diff", base, target, "--html", str(tmp_path / "diff.html")]) == 1
    link = re.search(r"target/model[^<\"]*\[([\d,]+)\]", (tmp_path / "diff.html").read_text())
    process = start("view", base, target, "--at", link[0])
    read_until(fd, f"[{link[1]}] ".encode(), process)
    read_until(fd, b"ULP", process)
    assert time.monotonic() - begun < 60
    os.write(fd, b"q")
    assert drain_until_exit(fd, process) == 0


def test_view_rejects_comparison_flags_for_one_run(terminal, tmp_path):
    fd, start = terminal
    process = start("view", str(toy_run(tmp_path / "base")), "--rtol", "1e-3")
    read_until(fd, b"--rtol applies to two runs", process)
    assert drain_until_exit(fd, process) == 2


def test_view_reports_a_missing_run_before_taking_the_screen(terminal, tmp_path):
    fd, start = terminal
    process = start("view", str(tmp_path / "none"))
    seen = read_until(fd, b"it does not exist", process)
    assert b"\x1b[?1049h" not in seen
    assert drain_until_exit(fd, process) == 3


def test_dashboard_imports_neither_torch_nor_the_capture_side():
    program = (
        "import sys, tapscope.dashboard.app; "
        "print(sorted({'torch', 'zmq', 'transformers', 'tapscope.engine', 'tapscope.dumper'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_browsing_one_run_does_not_import_the_comparator():
    program = (
        "import sys, tapscope.dashboard.app; "
        "print([each for each in sys.modules if each.startswith('tapscope.comparator')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    "module",
    [
        "dashboard.browse_source",
        "dashboard.module_tree",
        "render.anomalies",
        "render.record_text",
        "render.row_labels",
        "render.tensor_summary",
    ],
)
def test_render_modules_import_no_textual(module):
    program = f"import sys, tapscope.{module}; print('textual' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


SLOW = """
import sys, time
from tapscope.dashboard import app
from tapscope.dashboard.browse_source import RunSource
RunSource.open = classmethod(lambda cls, path: time.sleep(600))
sys.exit(app.browse(sys.argv[1]))
"""


def test_view_draws_before_reading_and_quits_without_waiting(terminal, tmp_path):
    fd, start = terminal
    process = start("-c", SLOW, toy_run(tmp_path / "run"), module=False)
    read_until(fd, b"READING", process)
    os.write(fd, b"q")
    drain_until_exit(fd, process)
    assert process.returncode == 0
