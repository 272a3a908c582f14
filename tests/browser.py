"""A headless Chromium, driven over the pipe of its DevTools protocol: page widths, keys, touches,
screenshots."""

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

KEYS = {"Tab": 9, "Enter": 13, "End": 35, "Home": 36, "ArrowRight": 39, "ArrowDown": 40}


class Page:
    """One page. `complaints`: exceptions of its scripts, errors of its console, and failed
    requests."""

    def __init__(self, writes: int, reads: int) -> None:
        self._writes, self._reads = os.fdopen(writes, "wb", 0), os.fdopen(reads, "rb")
        self._number, self._session = 0, ""
        self.complaints: list[str] = []
        self.requests: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def _call(self, method: str, **arguments: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": arguments}
        if self._session:
            message["sessionId"] = self._session
        self._writes.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer}"
                return answer["result"]
            self._hear(answer.get("method", ""), answer.get("params", {}))

    def _read(self) -> dict[str, Any]:
        content = bytearray()
        while not content.endswith(b"\0"):
            part = self._reads.read(1)
            assert part, "Chromium has ended"
            content += part
        return json.loads(content[:-1])

    def _hear(self, method: str, event: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(event["exceptionDetails"]))
        elif method == "Log.entryAdded" and event["entry"]["level"] == "error":
            self.complaints.append(json.dumps(event["entry"]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(event["request"]["url"])

    def open(self, url: str, width: int, height: int = 900) -> None:
        """Opens a URL on a screen of this width in pixels; below 600 it is a phone's."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self._call("Emulation.setTouchEmulationEnabled", enabled=width < 600)
        self._call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        found = self._call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, expression: str, seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while not self.ask(expression):
            assert time.monotonic() < end, f"{expression} did not come true: {self.complaints}"
            time.sleep(0.05)

    def press(self, key: str) -> None:
        for kind in ("rawKeyDown", "keyUp"):
            code = KEYS[key]
            text = {"text": "\r"} if key == "Enter" and kind == "rawKeyDown" else {}
            kind = "keyDown" if text else kind
            self._call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=code,
                **text,
            )

    def touch(self, *places: tuple[float, float]) -> None:
        """Touches the first place (window pixels), moves to the others, and lifts the finger."""
        for number, (x, y) in enumerate(places):
            self._call("Input.dispatchTouchEvent", type="touchMove" if number else "touchStart",
                       touchPoints=[{"x": x, "y": y}])  # fmt: skip
        self._call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    def overflow(self) -> int:
        """The number of pixels by which the page is wider than the screen."""
        return self.ask("document.scrollingElement.scrollWidth - innerWidth")

    def picture(self, path: Path) -> None:
        """Saves a screenshot of the whole page, however long."""
        content = self._call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(content["data"]))


@contextmanager
def chromium(profile: Path) -> Iterator[Page]:
    """Starts Chromium with a page. The test fails if Chromium is not installed."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.fail("Chromium is missing: apt-get install chromium")
    (its_in, our_out), (our_in, its_out) = os.pipe(), os.pipe()
    for end in (its_in, its_out):
        os.set_inheritable(end, True)
    command = [
        program,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--remote-debugging-pipe",
        "--no-first-run",
        f"--user-data-dir={profile}",
        "--disable-background-networking",
        "--hide-scrollbars",
    ]
    # The protocol's pipes are the descriptors 3 and 4.
    process = subprocess.Popen(
        ["bash", "-c", f'exec 3<&{its_in} 4>&{its_out}; exec "$@"', "bash", *command],
        pass_fds=(its_in, its_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(its_in)
    os.close(its_out)
    try:
        yield Page(our_out, our_in)
    finally:
        process.terminate()
        process.wait(timeout=30)
