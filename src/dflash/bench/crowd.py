"""Many conversations at once: so many workers in a closed loop, or one started every so many seconds.

Threads, because a backend's `generate` blocks on the network. They are daemons and never joined for long: a server that
hangs must not keep this process alive after Ctrl-C.
"""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections.abc import Callable, Sequence

from dflash.bench.record import LoadPart
from dflash.prepare.prompts import Conversation

LEAVE_SECONDS = 2.0
"""How long requests in flight may take to notice that they are cancelled."""
_LOOK_SECONDS = 0.05


class Waiting:
    """Seconds and waiting; replaced in tests."""

    def now(self) -> float:
        """Seconds since some moment."""
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)


def ask_many(
    conversations: Sequence[Conversation],
    load: LoadPart,
    converse: Callable[[Conversation], None],
    clock: Waiting,
    stop: threading.Event,
) -> None:
    """Call `converse` once for every conversation, in threads, as `load` says; return when all have returned.

    Leaves out what was not begun when `stop` is set. Ctrl-C sets it, gives requests in flight `LEAVE_SECONDS` to end
    and raises KeyboardInterrupt; what `converse` raises is raised, too.
    """
    crowd = _Crowd(conversations, converse, stop)
    try:
        if load.rate is None:
            crowd.closed_loop(load.concurrency or 1)
        else:
            crowd.arrivals(1.0 / load.rate, clock)
        crowd.wait()
    except KeyboardInterrupt:
        stop.set()
        crowd.leave()
        raise


class _Crowd:
    def __init__(
        self, conversations: Sequence[Conversation], converse: Callable[[Conversation], None], stop: threading.Event
    ) -> None:
        self._conversations = conversations
        self._converse = converse
        self._stop = stop
        self._threads: list[threading.Thread] = []
        self._errors: queue.SimpleQueue[BaseException] = queue.SimpleQueue()

    def closed_loop(self, concurrency: int) -> None:
        waiting: queue.SimpleQueue[Conversation] = queue.SimpleQueue()
        for conversation in self._conversations:
            waiting.put(conversation)

        def work() -> None:
            while not self._stop.is_set():
                try:
                    conversation = waiting.get_nowait()
                except queue.Empty:
                    return
                self._converse(conversation)

        for _ in range(min(concurrency, len(self._conversations))):
            self._start(work)

    def arrivals(self, spacing: float, clock: Waiting) -> None:
        started = clock.now()
        for index, conversation in enumerate(self._conversations):
            while (wait := started + index * spacing - clock.now()) > 0 and not self._stop.is_set():
                clock.sleep(min(wait, _LOOK_SECONDS))
            if self._stop.is_set():
                return
            self._start(functools.partial(self._converse, conversation))

    def wait(self) -> None:
        for thread in self._threads:
            while thread.is_alive():
                thread.join(_LOOK_SECONDS)
        if not self._errors.empty():
            raise self._errors.get()

    def leave(self) -> None:
        deadline = time.monotonic() + LEAVE_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _start(self, work: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                work()
            except BaseException as error:
                self._errors.put(error)  # for the thread that waits; raised there
                self._stop.set()
                if not isinstance(error, Exception):
                    raise

        thread = threading.Thread(target=guarded, daemon=True)
        thread.start()
        self._threads.append(thread)
