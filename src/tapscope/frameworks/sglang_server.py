"""SGLang's server with tapscope: ``python -m tapscope.frameworks.sglang_server --model-path MODEL ...``.

Accepts the options of ``sglang.launch_server``. Processes spawned by SGLang import this module first, as their main
module, and are therefore captured as well.
"""

import importlib.util
import runpy
import sys

from tapscope.frameworks.sglang import register

register()

if __name__ == "__main__":
    if importlib.util.find_spec("sglang") is None:
        sys.exit("tapscope: error: SGLang is not installed in this environment; install tapscope into that of SGLang")
    # Without alter_sys, this module remains __main__, which spawned processes import.
    runpy.run_module("sglang.launch_server", run_name="__main__")
