"""Browse a run in the terminal, and the plain-text core that the screen shares with `tapscope show` and `info`.

Only :mod:`~tapscope.dashboard.app`, ``screens`` and ``widgets`` need Textual; ``oddity``, ``rows``, ``digest``,
``paint`` and ``sources`` do not.
"""
