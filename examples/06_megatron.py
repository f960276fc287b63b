"""Compare one checkpoint in transformers and in Megatron-core on CPU, forward and backward.

    python examples/06_megatron.py CHECKPOINT OUT [--tp 2] [--pp 2] [--patch FILE.py:FUNCTION]

The exit code is that of `tapscope diff`: 0 when the runs agree. FUNCTION(model) is called on every rank and can seed a
bug.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from megatron_team import Job, Team, run_transformers


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="a Llama, Qwen2 or Qwen3 in Hugging Face format, small enough for a CPU")
    parser.add_argument("out", type=Path, help="directory for the two runs")
    parser.add_argument("--tp", type=int, default=2, help="tensor-parallel ranks of Megatron (default: 2)")
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages (default: 1)")
    parser.add_argument("--patch", help="FILE.py:FUNCTION")
    args = parser.parse_args()
    baseline, target = args.out / "transformers", args.out / "megatron"
    run_transformers(Job(checkpoint=args.checkpoint, out=str(baseline), backward=True))
    with Team(args.tp, pp=args.pp) as team:
        team.capture(Job(checkpoint=args.checkpoint, out=str(target), backward=True, patch=args.patch))
    return subprocess.run([sys.executable, "-m", "tapscope", "diff", baseline, target], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
