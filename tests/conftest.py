"""What all tests start from."""

from __future__ import annotations

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell that starts the tests in the background makes them, and every command that they start, deaf to Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
