"""A two-minute tour of tapscope on a small generated model. Run it with `make demo`.

Every command is printed before it runs, so that you can repeat it by hand.
"""

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

from tapscope import wait_for_ready

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache" / "demo"
PROMPTS = ["def main():", "import os, sys\nclass Reader(object):\n    def __init__(self", "for i in range(10):"]
DAMAGED = "model.layers.2.mlp.down_proj"


def say(text: str) -> None:
    print(f"\n\033[1m{text}\033[0m" if sys.stdout.isatty() else f"\n{text}", flush=True)


def run(*words: object, expect: int = 0) -> None:
    """Print and run one command; exit the demo unless the command's exit code is ``expect``."""
    command = [str(word) for word in words]
    print("$ " + shlex.join(command), flush=True)
    done = subprocess.run([_find(command[0]), *command[1:]], cwd=CACHE, check=False)
    if done.returncode != expect:
        sys.exit(f"the demo expected exit code {expect} and got {done.returncode}")
    print(f"(exit code {done.returncode})", flush=True)


def _find(name: str) -> str:
    installed = Path(sys.executable).with_name(name)
    return str(installed) if installed.exists() else name


def make_models() -> None:
    """Create the checkpoint (cached) and a copy with one damaged tensor."""
    if not (CACHE / "tiny" / "tokenizer.json").exists():
        say("Training a small Llama on the standard library's source (300 steps, once: half a minute or more)")
        run("python", ROOT / "examples/tiny_llama.py", "tiny")
    shutil.rmtree(CACHE / "damaged", ignore_errors=True)
    run("python", ROOT / "examples/damage.py", "tiny", "damaged", f"{DAMAGED}.weight")


def compare() -> None:
    """Compare an fp32 reference with a bf16 TP=2 engine, then with a damaged copy."""
    prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    say("1. A reference run: transformers, fp32, a padded batch")
    run("tapscope", "dump", "tiny", "-o", "reference", "--backend", "hf", *prompts)
    say("2. The same tokens through the engine: two ranks, bf16, packed rows")
    engine = ("--tp", 2, "--dtype", "bfloat16", "--tokens-from", "reference")
    run("tapscope", "dump", "tiny", "-o", "engine", *engine)
    say("3. Do they agree? Other framework, layout, sharding and dtype: only rounding should be left")
    run("tapscope", "diff", "reference", "engine")
    say(f"4. The same engine on a checkpoint in which {DAMAGED}.weight is damaged")
    run("tapscope", "dump", "damaged", "-o", "broken", *engine)
    say("5. Against the undamaged copy: the culprit is named, everything downstream is folded")
    run("tapscope", "diff", "engine", "broken", expect=1)
    say("6. And against the fp32 reference, where everything differs a little anyway")
    run("tapscope", "diff", "reference", "broken", expect=1)


def steer() -> None:
    """Serve the model and control its capture over HTTP."""
    say("7. A live engine: no hook is on the model until capture is requested")
    port = _free_port()
    address = f"127.0.0.1:{port}"
    command = ["tapscope", "serve", "tiny", "-o", "live", "--listen", address]
    print("$ " + shlex.join(command) + " &", flush=True)
    server = subprocess.Popen([_find(command[0]), *command[1:]], cwd=CACHE)
    try:
        wait_for_ready(address, server)
        body = json.dumps({"enabled": True, "keep": "full", "rules": ["layers.3.*:out=full", "*=stats"]})
        run("curl", "-sw", "\n", "-X", "POST", f"http://{address}/dumper/configure", "-d", body)
        text = json.dumps({"text": PROMPTS[0], "sampling_params": {"max_new_tokens": 6}})
        run("curl", "-sw", "\n", "-X", "POST", f"http://{address}/generate", "-d", text)
        run("curl", "-sw", "\n", "-X", "POST", f"http://{address}/dumper/configure", "-d", '{"enabled": false}')
        run("tapscope", "ctl", address, "state", "--table")
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=30)
    run("tapscope", "info", "live")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def main() -> None:
    CACHE.mkdir(parents=True, exist_ok=True)
    for name in ("reference", "engine", "broken", "live"):
        shutil.rmtree(CACHE / name, ignore_errors=True)
    os.environ.setdefault("COLUMNS", "110")
    make_models()
    compare()
    steer()
    say("Now look for yourself:")
    print(f"  {os.path.relpath(_find('tapscope'))} view {os.path.relpath(CACHE / 'broken')}")


if __name__ == "__main__":
    main()
