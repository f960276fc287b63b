"""Color themes: dark, light, and the terminal's own colors.

Orange marks differences and anomalies, blue the focus. Color is never the only signal.
"""

from dataclasses import replace

from rich.style import Style
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
"""Textual's theme for 16-color terminals with a yellow accent, because its green accent would suggest success."""
NAMES = {"dark": DARK.name, "light": LIGHT.name, "ansi": ANSI.name}
"""Value of ``--theme`` -> name of the theme."""

_HEAT: dict[str, tuple[tuple[str, str], ...]] = {
    DARK.name: (
        ("#ffe0b0", "#5c3a10"),
        ("#ffe6c0", "#7d4a12"),
        ("#fff3e0", "#a55d14"),
        ("#14161a", "#cb7420"),
        ("#14161a", "#e58d3a"),
        ("#14161a", "#f2a95f"),
        ("#14161a", "#f8c48b"),
        ("#14161a", "#fcdcb6"),
        ("#14161a", "#fff1de"),
    ),
    LIGHT.name: (
        ("#22262c", "#fbd48a"),
        ("#22262c", "#f7b155"),
        ("#22262c", "#ee8a33"),
        ("#ffffff", "#c24f16"),
        ("#ffffff", "#b03614"),
        ("#ffffff", "#992015"),
        ("#ffffff", "#741010"),
        ("#ffffff", "#540a0e"),
        ("#ffffff", "#35060b"),
    ),
    ANSI.name: (*[("yellow", "default")] * 2, *[("black", "yellow")] * 2, *[("white", "red")] * 5),
}
"""Theme -> (text color, background color) per heat-map glyph, from 1 to 9 decades above the floor."""


def heat_style(theme: str, glyph: str) -> Style | None:
    """Return the style of a heat-map cell whose glyph is a digit from 1 to 9; None for any other glyph or theme."""
    colours = _HEAT.get(theme)
    if colours is None or not glyph.isdecimal():
        return None
    text, background = colours[int(glyph) - 1]
    return Style(color=text, bgcolor=background, bold=True)
