"""Assertions for test suites."""

import argparse
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tapscope.comparator import Report
    from tapscope.run_format.run import Run

    RunLike = Run | str | os.PathLike[str]

__all__ = ["assert_matches_golden", "assert_runs_close"]


def assert_runs_close(baseline: "RunLike", target: "RunLike", **options: Any) -> "Report":
    """Fail unless ``tapscope diff baseline target`` would exit with 0; returns the report.

    ``options`` are the options of ``tapscope diff`` for selection, matching and tolerances, spelled with underscores,
    as strings, numbers or lists. The project's options (`tapscope.toml`, or `[tool.tapscope.diff]` in `pyproject.toml`)
    apply too.

    ::

        assert_runs_close("reference", "served", skip=["*:in[*]"], rule="lm_head:out=rel < 1e-3")

    Raises AssertionError with the four summary lines if the runs differ or data are partial, ConfigError or UsageError
    for an invalid option, and the errors of :func:`tapscope.compare` if the runs cannot be read or compared.
    """
    __tracebackhide__ = True
    from tapscope.comparator import compare

    report = compare(_path(baseline), _path(target), _options(options))
    if report.exit_code:
        raise AssertionError(f"{_name(baseline)} and {_name(target)}:\n{report}")
    return report


def assert_matches_golden(golden: "str | os.PathLike[str]", run: "RunLike", **options: Any) -> "Report":
    """Fail unless ``tapscope golden check golden run`` would exit with 0; returns the report.

    Like :func:`assert_runs_close`, with a file written by ``tapscope golden record`` as the baseline. Raises
    RunCorruptError if ``golden`` is not a golden file.
    """
    __tracebackhide__ = True
    from pathlib import Path

    from tapscope.core.errors import RunCorruptError
    from tapscope.run_format.golden import is_golden

    if not is_golden(Path(golden)):
        raise RunCorruptError(f"{golden} is not a golden file; write one with: tapscope golden record RUN -o FILE")
    return assert_runs_close(golden, run, **options)


def _options(options: dict[str, Any]) -> Any:
    """Build CompareOptions from the project's settings, overridden by ``options``."""
    from tapscope.cli import VERBS, compare_flags, project_settings
    from tapscope.cli.diff import DiffCommand
    from tapscope.cli.parser import Parser
    from tapscope.core.errors import UsageError

    flags = argparse.ArgumentParser(add_help=False)
    compare_flags.add_flags(flags)
    words = project_settings.words_of("assert_runs_close", options, flags)
    parser = Parser("diff", "")
    DiffCommand().prepare(parser)
    settings = project_settings.read("diff", VERBS, parser)
    try:
        args = parser.parse([*(settings.words if settings else ()), *words, "baseline", "target"])
    except UsageError as error:
        raise UsageError(str(error).partition("; see: ")[0]) from None
    return compare_flags.options_of(args)


def _path(run: "RunLike") -> Any:
    return os.fspath(run) if isinstance(run, os.PathLike) else run


def _name(run: "RunLike") -> str:
    return str(getattr(run, "path", run))
