"""Temporary directories: those of a killed owner are removed when the next one is created, no others."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from tapscope import Dumper, open_run
from tapscope.core.tempdirs import make_tempdir, remove_stale_tempdir, remove_tempdir
from tapscope.core.wire import VERSION

PROGRAM = """
import sys
from pathlib import Path
from tapscope.core.tempdirs import make_tempdir
print(make_tempdir(Path(sys.argv[1])), flush=True)
sys.stdin.read()
"""


def test_tempdirs_of_killed_processes_are_removed_by_the_next(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        theirs = Path(owner.stdout.readline().strip())
        assert theirs.stat().st_mode & 0o777 == 0o700
        (theirs / "socket").touch()
        (tmp_path / "tapscope-unlocked").mkdir()
        (tmp_path / "tapscope-elsewhere").symlink_to(theirs)
        (tmp_path / "other").mkdir()
        mine = make_tempdir(tmp_path)
        assert theirs.is_dir()  # its owner is alive
        owner.kill()
    again = make_tempdir(tmp_path)
    assert not theirs.exists()
    assert {path.name for path in tmp_path.iterdir()} == {
        mine.name, again.name, "tapscope-unlocked", "tapscope-elsewhere", "other"
    }  # fmt: skip
    before = len(os.listdir("/proc/self/fd"))
    for folder in (mine, again, again):
        remove_tempdir(folder)
        assert not folder.exists()
    assert len(os.listdir("/proc/self/fd")) == before - 2


def test_tempdirs_never_remove_a_foreign_directory(tmp_path: Path) -> None:
    theirs = tmp_path / "tapscope-results"
    theirs.mkdir()
    (theirs / "lock").write_bytes(b"mine")
    (theirs / "values.npy").touch()
    make_tempdir(tmp_path)
    assert not remove_stale_tempdir(theirs)
    assert (theirs / "values.npy").exists()


def test_recorder_file_cannot_make_a_dumper_remove_another_directory(tmp_path: Path) -> None:
    victim = tmp_path / "tapscope-runs"
    (victim / "yesterday").mkdir(parents=True)
    out = tmp_path / "out"
    out.mkdir()
    (out / "recorder.json").write_text(json.dumps({"address": f"ipc://{victim}/ranks", "pid": 1, "wire": VERSION}))
    with Dumper(torch.nn.Linear(2, 2), out=str(out)) as dumper, dumper.step():
        dumper.dump("x", torch.zeros(2))
    assert (victim / "yesterday").is_dir()
    assert [str(record.key.site) for record in open_run(out).records] == [":tap[x]"]
