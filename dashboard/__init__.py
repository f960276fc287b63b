"""Terminal and web viewers of runs and comparisons, and the plain-text views that `tapscope show` and `info` print.

Only :mod:`~tapscope.dashboard.app`, ``keymap``, ``messages``, ``theme``, ``screens`` and ``widgets`` import Textual.
"""
