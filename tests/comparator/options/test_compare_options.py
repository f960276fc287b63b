"""Options of the wrong type are rejected on construction."""

from typing import Any

import pytest

from tapscope.comparator import CompareOptions
from tapscope.core.errors import ConfigError


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"sites": "*mlp*"}, r"^sites='\*mlp\*': must be a tuple of strings, e.g. \('\*mlp\*',\)$"),
        ({"layers": "0-3"}, r"^layers='0-3': must be a set of integers, e.g. \{0, 1\}$"),
        ({"steps": 3}, r"^steps=3: must be a set of integers"),
    ],
)
def test_compare_options_of_the_wrong_type_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        CompareOptions(**options)
