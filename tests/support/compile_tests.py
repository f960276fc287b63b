"""Compile the modules that pytest-xdist workers import, on all cores, so that not every worker compiles them."""

import compileall
import multiprocessing
import os
from collections.abc import Iterable
from pathlib import Path

import pytest
from _pytest.assertion import rewrite


def compile_all(config: pytest.Config, folders: Iterable[Path]) -> None:
    """Write missing bytecode of the files in ``folders``: tests as pytest compiles them, others as Python does."""
    found = (Path(at, name) for each in folders for at, _, names in os.walk(each, followlinks=True) for name in names)
    files, count = [file for file in found if file.suffix == ".py"], os.cpu_count() or 1
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=_compile, args=(config, files[i::count])) for i in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


def _compile(config: pytest.Config, files: list[Path]) -> None:
    for file in files:
        if file.name.startswith("test_") or file.name == "conftest.py":
            bytecode = rewrite.get_cache_dir(file) / f"{file.stem}{rewrite.PYC_TAIL}"
            if rewrite._read_pyc(file, bytecode) is None:
                bytecode.parent.mkdir(exist_ok=True)
                stat, code = rewrite._rewrite_test(file, config)
                rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, stat, bytecode)
        else:
            compileall.compile_file(file, quiet=2)
