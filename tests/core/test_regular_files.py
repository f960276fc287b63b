"""Files are replaced atomically."""

import os
from pathlib import Path

import pytest

from tapscope.core.regular_files import replacing


def test_replacing_is_atomic(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with replacing(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    with pytest.raises(ValueError, match="half"), replacing(path) as file:
        file.write(b"partial")
        raise ValueError("half")
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["file"]


def test_replacing_leaves_nothing_where_the_target_is_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()
    with pytest.raises(OSError), replacing(tmp_path / "file") as file:
        file.write(b"new")
    assert os.listdir(tmp_path) == ["file"]


def test_replacing_removes_what_killed_writers_left(tmp_path: Path) -> None:
    abandoned, current = (tmp_path / f".a.{digit * 16}.part" for digit in "01")
    others = [tmp_path / f".b.{'0' * 16}.part", tmp_path / ".a.part", tmp_path / "a.0"]
    for file in (abandoned, current, *others):
        file.touch()
    for file in (abandoned, *others):
        os.utime(file, (0, 0))
    with replacing(tmp_path / "a") as file:
        file.write(b"1")
    assert not abandoned.exists()
    assert all(file.exists() for file in (current, *others, tmp_path / "a"))
    assert len(os.listdir(tmp_path)) == 5
