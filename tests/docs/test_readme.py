"""The README's examples run as printed, in order; only the installation is not executed."""

import re
from pathlib import Path

import pytest
from doc_pages import ROOT, examples, missing, run
from soak_cases import mostly_soak

README = ROOT / "README.md"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("is_forked", mostly_soak([True, False], default=[True]))
def test_readme_blocks_run_as_printed(tmp_path: Path, is_forked: bool) -> None:
    shown = 0
    for example, printed in run(README, tmp_path, is_forked=is_forked):
        shown += bool(example.shown)
        assert "Traceback" not in printed
        assert missing(example.shown, printed) == [], f"README.md:{example.line} printed\n{printed}"
    assert shown >= 2


def test_readme_skips_only_the_installation_block() -> None:
    (install,) = [each for each in examples(README) if each.reason]
    assert install.code.startswith("pip install")
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"`make (\w+)`", README.read_text())
    assert targets
    assert [name for name in targets if not re.search(rf"^{name}:", makefile, re.MULTILINE)] == []


def test_readme_extras_are_declared() -> None:
    from tapscope.core.extras import EXTRAS

    page = (ROOT / "docs/index.md").read_text()
    assert set(re.findall(r"'\.\[(\w+)\]'", page)) == EXTRAS.keys() - {"bench"}


def test_readme_bullets_are_short() -> None:
    section = README.read_text().partition("## What you get")[2].partition("\n## ")[0]
    bullets = re.findall(r"^- (.*(?:\n  .*)*)", section, re.MULTILINE)
    assert len(bullets) > 5
    assert [each for each in bullets if len(each.split()) > 16] == []
