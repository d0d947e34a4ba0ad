"""Vega's JavaScript, which draws charts in a browser: inline, so that a page needs no
network.
"""

import os
from importlib.metadata import version
from pathlib import Path

from hpcfed.record.publish import publish

SNIPPET = "Object.assign(window, { vega, vegaLite, vegaEmbed });"
"""Gives the page's own script the names by which it calls them."""


def library() -> str:
    """Return Vega, Vega-Lite and Vega-Embed as one script.

    Putting it together takes seconds, so it is kept in the user's cache.
    """
    kept = _cache() / f"vega-{version('vl-convert-python')}.js"
    try:
        return kept.read_text(encoding="utf-8")
    except (OSError, ValueError):
        pass
    import vl_convert

    script: str = vl_convert.javascript_bundle(SNIPPET)
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        publish(script.encode(), kept)
    except OSError:
        pass  # a home that cannot be written to only costs the seconds again
    return script


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "hpcfed"
