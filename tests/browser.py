"""A headless Chromium that tests talk to, by its own protocol over a web socket."""

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
WAIT = 40.0
"""Seconds after which something has not happened."""


class Browser:
    """One tab."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._calls = 0
        self.events: list[dict[str, Any]] = []
        """What the browser has told without being asked."""

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol, and return its result."""
        self._calls += 1
        message = {"id": self._calls, "method": method, "params": params}
        self._socket.send(json.dumps(message))
        while True:
            answer = json.loads(self._socket.recv(timeout=WAIT))
            if answer.get("id") == self._calls:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def evaluate(self, script: str) -> Any:
        """Return the value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, script: str, expected: Any) -> None:
        """Wait until an expression has this value."""
        end = time.monotonic() + WAIT
        found = self.evaluate(script)
        while found != expected:
            assert time.monotonic() < end, f"{script} is {found}, not {expected}"
            time.sleep(0.02)
            found = self.evaluate(script)

    def click(self, element: str, *, times: int = 1) -> None:
        """Click with the mouse into the middle of what an expression returns."""
        self.evaluate(f"{element}.scrollIntoView({{block: 'center'}})")
        box = self.evaluate(f"(({element}).getBoundingClientRect().toJSON())")
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        mouse = {"x": x, "y": y, "button": "left", "clickCount": times}
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        self.call("Input.dispatchMouseEvent", type="mousePressed", **mouse)
        self.call("Input.dispatchMouseEvent", type="mouseReleased", **mouse)

    def complaints(self) -> list[str]:
        """Return errors and warnings of the console, and what was asked of a network."""
        found = []
        for event in self.events:
            told, params = event["method"], event["params"]
            if told == "Runtime.exceptionThrown" or told == "Log.entryAdded":
                found.append(str(params))
            if told == "Runtime.consoleAPICalled" and params["type"] != "log":
                found.append(str(params["args"]))
            if told == "Network.requestWillBeSent":
                url = params["request"]["url"]
                if not url.startswith(("file:", "data:", "blob:")):
                    found.append(url)
        return found


@contextmanager
def opened(page: Path, profile: Path) -> Iterator[Browser]:
    """Open a page in a browser of its own; skip the test where there is none."""
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine")
    client = pytest.importorskip("websockets.sync.client", reason="no websockets")
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"]
    words += ["--remote-debugging-port=0", "--window-size=1000,900"]
    # Nothing outside this machine has an address.
    words += ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE localhost"]
    words += [f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen([CHROMIUM, *words], stderr=subprocess.DEVNULL)
    try:
        with client.connect(_address(profile), max_size=None) as socket:
            browser = Browser(socket)
            for domain in ("Runtime", "Log", "Network", "Page"):
                browser.call(f"{domain}.enable")
            browser.call("Page.navigate", url=page.as_uri())
            yield browser
    finally:
        process.kill()
        process.wait()


def _address(profile: Path) -> str:
    """Return where the first tab listens, once the browser has said its port."""
    import urllib.request

    file = profile / "DevToolsActivePort"
    end = time.monotonic() + WAIT
    while not (file.exists() and file.read_text().count("\n") == 1):
        assert time.monotonic() < end, "the browser has not started"
        time.sleep(0.05)
    port = file.read_text().splitlines()[0]
    with urllib.request.urlopen(f"http://localhost:{port}/json/list") as answer:
        tabs = json.load(answer)
    tab = next(tab for tab in tabs if tab["type"] == "page")
    return str(tab["webSocketDebuggerUrl"])
