"""A headless Chromium, if this machine has one: opens a page, takes its picture and listens to its console.

Looked for on the path and where `make chromium` puts it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

UNPACKED = Path(__file__).parents[2] / ".venv" / "chromium"
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
_CONSOLE = re.compile(r"\bCONSOLE\b.*")


@dataclass(frozen=True)
class Browser:
    """A program that opens pages."""

    program: str
    libraries: str

    def screenshot(self, page: Path, picture: Path, width: int, height: int) -> list[str]:
        """Take a picture and return what the page said on its console."""
        _, console = self._run(page, width, height, f"--screenshot={picture}")
        return console

    def document(self, page: Path, width: int, height: int) -> tuple[str, list[str]]:
        """The document after its scripts have run, and what it said on its console."""
        return self._run(page, width, height, "--dump-dom")

    def _run(self, page: Path, width: int, height: int, action: str) -> tuple[str, list[str]]:
        profile = page.parent / "profile"
        command = [
            self.program,
            "--headless",
            "--no-sandbox",  # the page is our own, and containers often forbid the sandbox
            "--disable-gpu",
            "--hide-scrollbars",
            "--enable-logging=stderr",
            "--proxy-server=127.0.0.1:9",  # whatever the page would fetch must fail
            f"--user-data-dir={profile}",
            f"--window-size={width},{height}",
            action,
            page.absolute().as_uri(),
        ]
        environment = {**os.environ, **({"LD_LIBRARY_PATH": self.libraries} if self.libraries else {})}
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout, _CONSOLE.findall(done.stderr)


def find_browser() -> Browser | None:
    """The first Chromium that is there."""
    unpacked = UNPACKED / "usr" / "lib" / "chromium" / "chromium-headless-shell"
    if unpacked.exists():
        folders = list((UNPACKED / "usr" / "lib").glob("*-linux-gnu*"))
        libraries = [*folders, *(path for folder in folders for path in folder.iterdir() if path.is_dir())]
        return Browser(str(unpacked), ":".join(map(str, libraries)))
    for name in NAMES:
        if (found := shutil.which(name)) is not None:
            return Browser(found, "")
    return None
