"""The fast rollback of recurrent layers against the slow one, and that it leaves the model as it was."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from dflash.backends.torch.joining import join_and_pack
from dflash.backends.torch.target import TorchTarget
from dflash.types import Proposal
from tests.backends.architectures import ARCHITECTURES, model_of, tokens
from tests.backends.matrix import PROMPT, bare_logits, feed

RECURRENT = ["Qwen3-Next", "Qwen3.5", "Kimi-Linear", "Granite 4", "MiniMax-Text-01"]
BLOCK = tokens(6, seed=3)
NEXT = tokens(2, seed=4)


def num_wrapped(model: nn.Module) -> int:
    """Modules whose forward or hooks are not those of their class."""
    return sum("forward" in module.__dict__ or bool(module._forward_pre_hooks) for module in model.modules())


@pytest.mark.parametrize("family", RECURRENT)
def test_replayed_states_equal_those_of_feeding_again(family: str) -> None:
    """Fault: a recorded row too many or too few, a projection answered for another call, a window not rolled back.
    Two rounds, so that the second starts from a replayed state."""
    model = model_of(family)
    for kept in range(1, len(BLOCK)):
        logits, states = [], []
        for replays in (True, False):
            target = TorchTarget(model, exact_width=len(BLOCK) + 2, replays=replays)
            session = target.session(exact=kept == 2)  # once with padding rows
            session.prefill(PROMPT)
            for count in (kept, 2):
                feed(session, BLOCK)
                session.commit(range(count))
            states.append([tensor for layer in session._cache.layers for tensor in layer.committed()])
            logits.append(feed(session, NEXT))
            target.close()
        torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-4)
        for fast, slow in zip(*states, strict=True):
            torch.testing.assert_close(fast, slow, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("replays", [True, False])
@pytest.mark.parametrize("exact", [False, True])
def test_two_rejection_patterns_give_one_recurrent_state(exact: bool, replays: bool) -> None:
    """Fault: a recurrence that remembers rejected rows. The same tokens are fed in rounds with other accepted counts
    and other rejected tails; one more step must agree, with each other and with a run that was never rejected."""
    text = tokens(8, seed=5)
    model = model_of("Qwen3.5")
    target = TorchTarget(model, exact_width=4, replays=replays)
    found = []
    for pattern in ([1, 3, 2, 2], [4, 4], [1] * 8):
        session = target.session(exact=exact)
        session.prefill(PROMPT)
        fed = 0
        for kept in pattern:
            feed(session, [*text[fed : fed + kept], *tokens(3, seed=100 + fed + kept)])
            session.commit(range(kept))
            fed += kept
        assert fed == len(text)
        found.append(feed(session, NEXT))
    target.close()
    expected = bare_logits(model, [*PROMPT, *text, *NEXT])[-len(NEXT) :]
    for logits in found:
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("wrapped", [False, True], ids=["bare", "wrapped"])
@pytest.mark.parametrize("family", RECURRENT)
def test_replay_runs_no_projection_and_no_other_layer(family: str, wrapped: bool) -> None:
    """Fault: the fast way is the slow way: attention, experts or projections run again at commit. `wrapped`: another
    target over the same weights is open, as in `dflash check` and `dflash audit`."""
    model = ARCHITECTURES[family].build()  # of its own: what is counted must not depend on what other tests ran
    other = TorchTarget(model) if wrapped else None
    target = TorchTarget(model)
    session = target.session(exact=False)
    session.prefill(PROMPT)
    feed(session, BLOCK)
    multiplications: list[str] = []

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            name = str(func)
            if name.startswith(("aten.addmm", "aten.mm.", "aten._scaled_dot", "aten.linear")):
                multiplications.append(name)
            return func(*args, **(kwargs or {}))

    with Count():  # type: ignore[no-untyped-call]
        session.commit(range(3))
        assert not multiplications
        feed(session, NEXT)
    assert multiplications
    target.close()
    if other is not None:
        other.close()


def test_the_model_is_restored() -> None:
    """Fault: wrappers stay behind, or restoring takes another program's wrapper off."""
    model = ARCHITECTURES["Qwen3.5"].build()
    join_and_pack(model)
    before = bare_logits(model, PROMPT)
    others = num_wrapped(model)
    first, second = TorchTarget(model), TorchTarget(model)
    session = second.session(exact=False)
    session.prefill(PROMPT)
    feed(session, BLOCK)
    session.commit(range(2))
    assert torch.equal(bare_logits(model, PROMPT), before)
    assert num_wrapped(model) > others
    second.close()
    first.close()
    assert num_wrapped(model) == others
    assert torch.equal(bare_logits(model, PROMPT), before)


def test_two_threads_share_a_model() -> None:
    """Fault: one thread's recorded projections answer for another's forward."""
    target = TorchTarget(model_of("Qwen3.5"))
    expected: dict[int, torch.Tensor] = {}
    found: dict[int, torch.Tensor] = {}

    def decode(seed: int, results: dict[int, torch.Tensor]) -> None:
        session = target.session(exact=False)
        session.prefill(tokens(9, seed))
        for step in range(6):
            feed(session, tokens(5, seed + step))
            session.commit(range(1 + step % 4))
        results[seed] = session.verify(1, Proposal()).logits

    for seed in (10, 20):
        decode(seed, expected)
    threads = [threading.Thread(target=decode, args=(seed, found)) for seed in (10, 20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in (10, 20):
        assert torch.equal(found[seed], expected[seed])
    target.close()
