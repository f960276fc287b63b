"""``python -m tapscope.dumper.recorder``, see :mod:`tapscope.dumper.recorder.recorder`."""

import sys

from tapscope.dumper.recorder.recorder import main

if __name__ == "__main__":
    sys.exit(main())
