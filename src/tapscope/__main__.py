"""``python -m tapscope`` is the ``tapscope`` command."""

import sys

from tapscope.cli import main

if __name__ == "__main__":
    sys.exit(main())
