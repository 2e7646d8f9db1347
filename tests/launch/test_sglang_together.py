"""The launcher's process and the benchmark's client of SGLang together, over a stand-in that answers as SGLang 0.5.23's
source builds its answers. SGLang itself needs a GPU and has not been run."""

from __future__ import annotations

from pathlib import Path

from dflash.bench.backends.sglang import open_backend
from dflash.bench.protocol import BackendOptions, Request, Sampling
from dflash.launch.server import serving
from tests.launch.test_server import Stage

ROUNDS, ACCEPTED = 32, 96
HISTOGRAM = (3, 4, 6, 7, 5, 4, 2, 1)
"""[n]: verifications that accepted n draft tokens; 32 of them with 96 accepted."""


def test_started_asked_and_stopped(tmp_path: Path) -> None:
    """Guards against an acceptance read with or without the target's own token by one of the two, and against counting
    SGLang's proposals for accepted tokens."""
    stage = Stage(tmp_path)
    with serving(stage.plan, environment=stage.environment, log=stage.log):
        options = BackendOptions(url=stage.plan.url, stream=False, timeout=120.0)
        backend = open_backend(options, lambda what, share: None)
        request = Request(messages=({"role": "user", "content": "Capital?"},), sampling=Sampling(max_new_tokens=128))
        answer = backend.generate(request, "speculative")
        assert backend.info().engine == "SGLang 0.5.23"
        backend.close()
    stage.assert_gone()
    assert answer.text == "Paris."
    assert answer.num_tokens == 128
    rounds = answer.rounds
    assert rounds is not None
    assert (rounds.num_rounds, rounds.num_accepted, rounds.num_tokens) == (ROUNDS, ACCEPTED, ROUNDS + ACCEPTED)
    assert rounds.num_proposed == ROUNDS * 7
    assert rounds.lengths == {accepted + 1: count for accepted, count in enumerate(HISTOGRAM)}
