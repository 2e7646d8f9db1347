"""Stands where a serving engine would: a process with a helper process, a health page, and bad habits on request.

Run as a program by the tests, with the engine's own flags; what it is told and who its helpers are goes into the file
that FAKE_ENGINE_REPORT names. FAKE_ENGINE_HABIT: "" (serves), "dies" (leaves before it serves), "silent" (never becomes
healthy), "deaf" (ignores SIGTERM), "fails" (serves, then leaves by itself).
"""

from __future__ import annotations

import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

DIES_WITH, FAILS_WITH = 3, 7
LAST_WORDS = "CUDA out of memory, says the fake"
SGLANG_ANSWERS = Path(__file__).parent / "sglang_answers.json"


class Page(http.server.BaseHTTPRequestHandler):
    """Answers GET and POST by path, with bodies as SGLang 0.5.23's source builds them (it cannot run here)."""

    def do_GET(self) -> None:
        habit = os.environ.get("FAKE_ENGINE_HABIT", "")
        self._send(503 if habit == "silent" else 200, {} if self.path == "/health" else ANSWERS.get(self.path, {}))
        if habit == "fails" and self.path == "/health":  # whoever waited for it knows now that it serves
            threading.Timer(0.2, lambda: os._exit(FAILS_WITH)).start()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", "0")))
        self._send(200 if self.path in ANSWERS else 404, ANSWERS.get(self.path, {}))

    def _send(self, status: int, answer: object) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Keep the tests' output clean."""


ANSWERS: dict[str, object] = json.loads(SGLANG_ANSWERS.read_text(encoding="utf-8"))


def main() -> None:
    """Serve until told to stop; the helper process shows whether the whole group is stopped."""
    habit = os.environ.get("FAKE_ENGINE_HABIT", "")
    helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    report = {"argv": sys.argv[1:], "pids": [os.getpid(), helper.pid], "environment": dict(os.environ)}
    partial = Path(os.environ["FAKE_ENGINE_REPORT"] + ".partial")
    partial.write_text(json.dumps(report), encoding="utf-8")
    partial.replace(os.environ["FAKE_ENGINE_REPORT"])
    if habit == "dies":
        sys.stderr.write(LAST_WORDS + "\n")
        sys.exit(DIES_WITH)
    if habit == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    port = int(sys.argv[sys.argv.index("--port") + 1])
    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Page)
    sys.stdout.write("fake engine serves\n")
    sys.stdout.flush()
    server.serve_forever(poll_interval=0.05)
    time.sleep(600)


if __name__ == "__main__":
    main()
