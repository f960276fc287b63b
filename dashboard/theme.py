"""Themes: dark, light, and the terminal's own colours. Orange marks anomalies; color is never the only signal."""

from dataclasses import replace

from textual.theme import BUILTIN_THEMES, Theme

DARK = Theme(
    name="tapscope-dark",
    primary="#6aa2d8",
    secondary="#8a93a3",
    accent="#e8913a",
    warning="#e8913a",
    error="#e8913a",
    foreground="#d6d9de",
    background="#14161a",
    surface="#14161a",
    panel="#2a2f38",
    dark=True,
)
LIGHT = Theme(
    name="tapscope-light",
    primary="#1f5f9e",
    secondary="#5b6470",
    accent="#b35a00",
    warning="#b35a00",
    error="#b35a00",
    foreground="#22262c",
    background="#fbfbf9",
    surface="#fbfbf9",
    panel="#dfe3e8",
    dark=False,
)
_ODD = "ansi_yellow"
ANSI = replace(BUILTIN_THEMES["ansi-dark"], name="tapscope-ansi", accent=_ODD, warning=_ODD, error=_ODD)
"""The terminal's 16 colours as Textual takes them, but for its accent, which is green: what differs is not."""
NAMES = {"dark": DARK.name, "light": LIGHT.name, "ansi": ANSI.name}
"""Value of ``--theme`` -> theme."""
