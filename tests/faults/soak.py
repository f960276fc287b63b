"""The list of faults, each tried many times: `python tests/faults/soak.py [--only TEXT] [--times N] [--seed S]`.

Prints one line a fault: name, times tried, survived; exit code 1 when one was not survived. The seeds that were not
survived are printed; `--only NAME --times 1 --seed S` tries one again.
"""

import argparse
import contextlib
import io
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))  # where it is run as a script

from fault_list import CannotTry, Fault, all_faults


def try_often(fault: Fault, times: int, seed: int, place: Path) -> tuple[str, bool]:
    """The line of the summary, and whether every trial was survived."""
    survived, bad, began = 0, [], time.monotonic()
    for number in range(seed, seed + times):
        folder = Path(tempfile.mkdtemp(dir=place))
        noise = io.StringIO()
        try:
            with contextlib.redirect_stderr(noise):
                fault.attempt(number, folder)
        except CannotTry as reason:
            return f"{fault.name:<44} not tried: {reason}", True
        except Exception:  # noqa: BLE001 - whatever it was, the soak goes on
            bad.append(number)
            said = traceback.format_exc() + noise.getvalue()
            sys.stderr.write(f"--- {fault.name}, seed {number}, kept in {folder}\n{said}")
        else:
            survived += 1
            shutil.rmtree(folder, ignore_errors=True)
    took = time.monotonic() - began
    line = f"{fault.name:<44} {times:>4} tried {survived:>4} survived   seeds {seed}..{seed + times - 1} {took:>6.0f} s"
    return line + (f"   not survived: {bad}" if bad else ""), not bad


def main() -> int:
    """Try them all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="faults whose name holds this text")
    parser.add_argument("--times", type=int, help="trials of each fault; default: each its own number")
    parser.add_argument("--seed", type=int, default=1000, help="of the first trial; each next one adds 1")
    parser.add_argument("--list", action="store_true", help="print the names and how often each is tried")
    args = parser.parse_args()
    faults = [each for each in all_faults().values() if args.only in each.name]
    if args.list:
        for each in faults:
            print(f"{each.name:<44} {each.short:>4} in make test {each.long:>4} in make soak")
        return 0
    place = Path(tempfile.mkdtemp(prefix="tapscope-soak-"))
    fine = bool(faults)
    for each in faults:
        line, ok = try_often(each, args.times or each.long, args.seed, place)
        print(line, flush=True)
        fine = fine and ok
    if fine:
        shutil.rmtree(place, ignore_errors=True)
    print("all survived" if fine else "NOT all survived", flush=True)
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
