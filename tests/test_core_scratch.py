"""Directories for sockets: those of a killed owner go when the next one is made, nobody else's does."""

import os
import subprocess
import sys
from pathlib import Path

from tapscope.scratch import make_scratch, remove_scratch

PROGRAM = """
import sys
from pathlib import Path
from tapscope.scratch import make_scratch
print(make_scratch(Path(sys.argv[1])), flush=True)
sys.stdin.read()
"""


def test_what_a_killed_owner_left_goes_when_the_next_directory_is_made(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        theirs = Path(owner.stdout.readline().strip())
        assert theirs.stat().st_mode & 0o777 == 0o700
        (theirs / "socket").touch()
        (tmp_path / "tapscope-unlocked").mkdir()
        (tmp_path / "tapscope-elsewhere").symlink_to(theirs)
        (tmp_path / "other").mkdir()
        mine = make_scratch(tmp_path)
        assert theirs.is_dir()  # its owner lives
        owner.kill()
    again = make_scratch(tmp_path)
    assert not theirs.exists()
    assert {path.name for path in tmp_path.iterdir()} == {
        mine.name, again.name, "tapscope-unlocked", "tapscope-elsewhere", "other"
    }  # fmt: skip
    before = len(os.listdir("/proc/self/fd"))
    for folder in (mine, again, again):
        remove_scratch(folder)
        assert not folder.exists()
    assert len(os.listdir("/proc/self/fd")) == before - 2
