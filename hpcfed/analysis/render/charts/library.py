"""Vega's JavaScript, which draws charts in a browser: inline, so that a page needs no
network.
"""

from importlib.metadata import version

from hpcfed.runtime import cache

SNIPPET = "Object.assign(window, { vega, vegaLite, vegaEmbed });"
"""Gives the page's own script the names by which it calls them."""


def library() -> str:
    """Return Vega, Vega-Lite and Vega-Embed as one script.

    Putting it together takes seconds, so it is kept in the user's cache.
    """
    name = f"vega-{version('vl-convert-python')}.js"
    kept = cache.read(name)
    if kept is not None:
        return kept.decode()
    import vl_convert

    script: str = vl_convert.javascript_bundle(SNIPPET)
    cache.write(name, script.encode())
    return script
