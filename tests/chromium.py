"""A headless Chromium for tests of HTML files, spoken to in the DevTools protocol over a pipe."""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-background-networking --disable-component-update --disable-sync "
    "--no-first-run --disable-dev-shm-usage --remote-debugging-pipe"
).split()
TIMEOUT_SECONDS = 60


def executable() -> str | None:
    """Path of the browser, or None where none is installed (``make browser`` installs one)."""
    found = (shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome"))
    return next((path for path in found if path), None)


class Page:
    """One tab. ``url`` opens in it, ``evaluate`` runs JavaScript in it, ``problems`` collects what went wrong in it."""

    def __init__(self, commands: int, replies: int) -> None:
        self._commands, self._replies, self._buffer, self._number = commands, replies, b"", 0
        self._session: str | None = None
        self.problems: list[str] = []
        self.requests: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._call(f"{domain}.enable")

    def open(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Load the page and wait until the browser has drawn it; ``requests`` holds what it asked for meanwhile."""
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._call("Emulation.setEmulatedMedia", features=features)
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", **metrics)
        self._call("Page.navigate", url=url)
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not self.evaluate(f"document.readyState === 'complete' && location.href.startsWith({url[:5]!r})"):
            assert time.monotonic() < deadline, f"{url} did not load in {TIMEOUT_SECONDS} s"
            time.sleep(0.05)

    def evaluate(self, expression: str) -> Any:
        """Value of a JavaScript expression, promises awaited; an exception in it fails the test."""
        result = self._call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def press(self, key: str, code: int) -> None:
        """A key with its Windows key code, for whatever has the focus."""
        for kind in ("rawKeyDown", "keyUp"):
            self._call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def screenshot(self, path: Path) -> None:
        """PNG of the whole page, from top to bottom."""
        reply = self._call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(reply["data"]))

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._receive()
            if reply.get("id") == self._number:
                assert "error" not in reply, (method, reply["error"])
                return dict(reply["result"])
            self._note(reply)

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._replies], [], [], max(0.0, deadline - time.monotonic()))
            received = os.read(self._replies, 1 << 20) if ready else b""
            assert received, f"chromium closed, or said nothing for {TIMEOUT_SECONDS} s"
            self._buffer += received
        message, self._buffer = self._buffer.split(b"\0", 1)
        return dict(json.loads(message))

    def _note(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(parameters["exceptionDetails"]))
        elif event.get("method") == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.problems.append(parameters["entry"]["text"])
        elif event.get("method") == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])


@contextmanager
def open_page(profile: Path) -> Iterator[Page]:
    """A tab of a browser of its own, which ends with the block. ``profile``: an empty folder."""
    browser = executable()
    assert browser is not None
    to_browser, from_browser = _pipe(), _pipe()
    # Chromium reads commands from descriptor 3 and answers on 4.
    redirect = f'exec "$@" 3<&{to_browser[0]} 4>&{from_browser[1]}'
    process = subprocess.Popen(
        ["bash", "-c", redirect, "bash", browser, *FLAGS, f"--user-data-dir={profile}"],
        pass_fds=(to_browser[0], from_browser[1]),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_browser[0])
    os.close(from_browser[1])
    try:
        yield Page(to_browser[1], from_browser[0])
    finally:
        os.close(to_browser[1])  # its end tells Chromium to go
        os.close(from_browser[0])
        process.terminate()
        process.wait(TIMEOUT_SECONDS)


def _pipe() -> tuple[int, int]:
    """A pipe (read end, write end) whose descriptors are not 3 or 4, which the browser's own take."""
    low = os.pipe()
    high = tuple(fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10) for descriptor in low)
    for descriptor in low:
        os.close(descriptor)
    return high[0], high[1]
