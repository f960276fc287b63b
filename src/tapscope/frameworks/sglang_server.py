"""SGLang's server with tapscope: ``python -m tapscope.frameworks.sglang_server --model-path MODEL ...``.

Takes the options of ``sglang.launch_server``. The processes that SGLang spawns import this module first, as that of the
main program, and so are captured, too.
"""

import importlib.util
import runpy
import sys

from tapscope.frameworks.sglang import register

register()

if __name__ == "__main__":
    if importlib.util.find_spec("sglang") is None:
        sys.exit("tapscope: error: SGLang is not installed in this environment; install tapscope into that of SGLang")
    # Without alter_sys this module stays __main__: the one that spawned processes import.
    runpy.run_module("sglang.launch_server", run_name="__main__")
