"""Idle OpenMP threads sleep in tapscope's own processes; the user's processes and settings stay unchanged."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tapscope.engine.distributed.openmp_threads import children_sleep_when_idle

_POLICY = "OMP_WAIT_POLICY"


_PROGRAM = """
import os, sys
from pathlib import Path
from tapscope.engine.distributed.worker_processes import WorkerProcesses

def tell(number, path):
    Path(path).write_text(os.environ.get("OMP_WAIT_POLICY", "unset"))

if __name__ == "__main__":
    workers = WorkerProcesses()
    workers.start(tell, (sys.argv[1],), 1, "test")
    for process in workers._processes.values():
        process.join(60)
    workers.abandon()
    workers.close()
    print(os.environ.get("OMP_WAIT_POLICY", "unset"))
"""


@pytest.mark.parametrize(("own", "expected"), [(None, "passive"), ("active", "active")])
def test_children_sleep_when_idle_affects_workers_only(tmp_path: Path, own: str | None, expected: str) -> None:
    program, output = tmp_path / "program.py", tmp_path / "said"
    program.write_text(_PROGRAM)
    command = [sys.executable, str(program), str(output)]
    done = subprocess.run(command, capture_output=True, text=True, env=_environment(own), timeout=120)
    assert done.stdout.split() == [own or "unset"], done.stderr
    assert output.read_text() == expected


def _environment(own: str | None) -> dict[str, str]:
    others = {name: value for name, value in os.environ.items() if name != _POLICY}
    return others | ({_POLICY: own} if own else {})


def test_children_sleep_when_idle_restores_the_environment_on_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(_POLICY, raising=False)
    with pytest.raises(ValueError, match="no"), children_sleep_when_idle():
        raise ValueError("no")
    assert _POLICY not in os.environ


@pytest.mark.parametrize(("own", "expected"), [(None, "passive"), ("active", "active")])
def test_serve_sets_wait_policy_before_importing_torch(own: str | None, expected: str) -> None:
    code = (
        "import os, sys; from tapscope.cli import main; import tapscope.engine.distributed.openmp_threads as waiting\n"
        "real = waiting.sleep_when_idle\n"
        "def sleep_when_idle():\n    print('torch' in sys.modules); real()\n"
        "waiting.sleep_when_idle = sleep_when_idle\n"
        "main(['serve', 'no-model', '--listen', 'nowhere:x']); print(os.environ['OMP_WAIT_POLICY'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=_environment(own), timeout=120
    )
    assert done.stdout.split() == ["False", expected], done.stderr
