"""What a request may still lose: the bound on how much slower than plain decoding it can ever get.

Guesses and drafts are bets: they cost time for certain and bring tokens perhaps. Estimates choose the bets
(`core/adaptive.py`), but an estimate can be wrong, a draft can claim anything, and a probability is no promise. So
every request keeps a ledger in units of a plain step: each round brings as many units as it gave tokens, and costs what
it took; a bet is made only if the balance would stay positive should all of it be lost. Then whatever is guessed,

    time of n tokens  <=  (1 + RATE) * n + ALLOWANCE      plain steps, as far as the measured costs are right,

2.4 % above plain decoding at 128 tokens, which leaves room for costs that a smooth curve does not fit. The very first
bet may be larger, so that a dear draft gets its chance; a request that loses it waits until the bound holds again. A
draft that pays is soon far in credit and does not notice.
"""

from __future__ import annotations

ALLOWANCE = 1.8
"""Plain steps that a request may lose before it has gained any."""
FIRST = 3.0
"""Largest bet while nothing is lost yet."""
RATE = 0.01
"""Further plain steps it may lose per token: what probing costs at most in the long run."""
MOST = 16.0
"""Gains beyond this do not count, so that a text that turns bad late does not lose all that it gained."""


class Ledger:
    """The balance of one request."""

    def __init__(self) -> None:
        self.balance = ALLOWANCE

    @property
    def limit(self) -> float:
        """Plain steps that this round may lose."""
        return max(self.balance, FIRST) if self.balance >= ALLOWANCE else self.balance

    def book(self, num_tokens: int, steps: float) -> None:
        """A round gave `num_tokens` and took as long as `steps` plain steps."""
        self.balance = min(self.balance + (1 + RATE) * num_tokens - steps, MOST)
