"""Options as words of a command line."""

import json
from collections.abc import Mapping
from typing import Any


def flag_text(value: Any) -> str:
    """Return a value as it is typed after its flag."""
    if isinstance(value, list):
        return ",".join(map(str, value))
    if isinstance(value, dict):
        return json.dumps(value)
    return str(value)


def flags(given: Mapping[str, Any]) -> list[str]:
    """Return options as words of a command line."""
    words = []
    for name, value in given.items():
        option = name.replace("_", "-")
        text = flag_text(value)
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        elif text.startswith("-"):  # argparse would take it for an option
            words.append(f"--{option}={text}")
        else:
            words += [f"--{option}", text]
    return words
