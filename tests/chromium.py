"""Headless Chromium, spoken to over a pipe by its DevTools protocol: pages as readers see them."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
LONGEST_S = 60
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe",
    "--no-first-run", "--disable-background-networking", "--disable-extensions",
    "--disable-dev-shm-usage",
)  # fmt: skip


def found() -> str | None:
    """Return where Chromium is, None where it is not installed."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Chromium:
    """One browser with one page. The pipe carries JSON texts that end in a zero byte."""

    def __init__(self) -> None:
        program = found()
        if program is None:
            raise FileNotFoundError(f"none of {', '.join(NAMES)} is installed.")
        self._folder = tempfile.TemporaryDirectory(prefix="gemmule-chromium-")
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (theirs_in, theirs_out)]

        def place() -> None:  # Chromium reads from descriptor 3 and writes to 4
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)

        command = [program, *FLAGS, f"--user-data-dir={self._folder.name}", "about:blank"]
        self._process = subprocess.Popen(
            command,
            preexec_fn=place,
            pass_fds=(3, 4),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for fd in (theirs_in, theirs_out, *high):
            os.close(fd)
        self._number, self._rest, self._session, self._loaded = 0, b"", "", False
        self.requests: list[str] = []
        self.complaints: list[str] = []  # what the console of the page says
        targets = self.ask("Target.getTargets")["targetInfos"]
        page = next(one["targetId"] for one in targets if one["type"] == "page")
        attached = self.ask("Target.attachToTarget", targetId=page, flatten=True)
        self._session = attached["sessionId"]
        self.ask("Page.enable")
        self.ask("Network.enable")
        self.ask("Log.enable")

    def close(self) -> None:
        """End the browser."""
        self._process.terminate()
        self._process.wait(20)
        for fd in (self._in, self._out):
            os.close(fd)
        self._folder.cleanup()

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result; RuntimeError with what Chromium says is wrong."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            if not select.select([self._in], [], [], LONGEST_S)[0]:
                raise RuntimeError(f"Chromium has not answered for {LONGEST_S} s.")
            more = os.read(self._in, 1 << 16)
            if not more:
                raise RuntimeError("Chromium ended.")
            self._rest += more
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        if message.get("method") == "Network.requestWillBeSent":
            url = message["params"]["request"]["url"]
            self.requests += [] if url.startswith("data:") else [url]
        if message.get("method") == "Page.loadEventFired":
            self._loaded = True
        if message.get("method") == "Log.entryAdded":
            self.complaints.append(message["params"]["entry"]["text"])
        return message

    def show(self, page: Path, width: int, height: int, scheme: str, media: str = "screen") -> None:
        """Open a file in a window of this size, for a reader who prefers ``light`` or ``dark``."""
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 500,
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.ask("Emulation.setEmulatedMedia", media=media, features=features)
        self._open("about:blank")
        self.requests.clear()
        self.complaints.clear()
        self._open(page.as_uri())

    def _open(self, address: str) -> None:
        """Go to an address and wait until it is there, whether or not scripts may run."""
        self._loaded = False
        self.ask("Page.navigate", url=address)
        while not self._loaded:
            self._next()

    def run(self, script: str) -> Any:
        """Return what an expression of JavaScript gives in the page; promises are waited for."""
        answer = self.ask(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def press(self, key: str, text: str = "") -> None:
        """Press a key and let it go."""
        for kind in ("keyDown", "keyUp"):
            given = {"text": text} if text and kind == "keyDown" else {}
            code = {"Tab": 9, "Enter": 13, "Escape": 27}.get(key, ord(key[0].upper()))
            self.ask(
                "Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **given
            )

    def picture(self, whole: bool = False) -> bytes:
        """Return what is seen as a PNG; whole: all of the page."""
        return base64.b64decode(
            self.ask("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        )
