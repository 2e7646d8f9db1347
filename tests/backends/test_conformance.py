"""The suite that every backend passes: a tiny pair on disk, lossless whatever the draft says, rolled back exactly, and
no request leaves a trace.

The target is a random float32 Llama, so a wrongly kept or dropped row, a shifted position or a leaked state changes
its greedy text within a few tokens: equal ids over hundreds of tokens cannot come about by chance.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dflash import SamplingParams, Stats
from dflash.cache import file_sha256
from dflash.core.engine import Engine, StreamEvent
from dflash.types import Drafting, Proposal
from tests.backends import tiny_pair
from tests.backends.pairs import BACKENDS, GREEDY, PROMPTS, SAMPLED, OpenEngine, PlainTexts
from tests.backends.tiny_pair import END, random_draft, save_draft, save_target


@pytest.fixture(scope="module")
def engine(open_engine: OpenEngine, target_folder: Path, draft_folder: Path) -> Engine:
    return open_engine(target_folder, draft_folder)


class ScriptedDrafter:
    """Proposes the first `right()` tokens of the true continuation and wrong ones after them."""

    def __init__(self, truth: Sequence[int], seed: int) -> None:
        self.truth, self.draw, self.seen = truth, random.Random(seed), 0
        self.max_proposal = 7

    def session(self) -> ScriptedDrafter:
        return self

    def observe(self, token_ids: Sequence[int], features: object) -> None:
        self.seen += len(token_ids)

    def propose(self, anchor: int, budget: int) -> Proposal:
        true = self.truth[self.seen + 1 : self.seen + 1 + budget]
        right = self.draw.randint(0, budget)
        wrong = [(token + 1 + self.draw.randrange(200)) % 256 for token in true[right:]]
        return Proposal((*true[:right], *wrong))


# Lossless


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_random_and_trained_drafts_change_nothing(
    engine: Engine, trained: Engine, plain_texts: PlainTexts, prompt: str, params: SamplingParams
) -> None:
    """The promise itself: same ids and text with a useless and with a good draft, greedy and at a temperature."""
    plain, accepted = plain_texts(prompt, params), []
    for pair in (engine, trained):
        drafted = pair.generate(prompt, params, drafting=Drafting(fixed=True))
        assert drafted.token_ids == plain.token_ids
        assert drafted.text == plain.text
        if prompt is PROMPTS[-1]:  # by cost; other prompts: test_adaptive_engine.py
            assert pair.generate(prompt, params).token_ids == plain.token_ids
        assert plain.stats.num_proposed == 0 < drafted.stats.num_proposed
        accepted.append(drafted.stats.num_accepted)
    if params is GREEDY:  # otherwise the equality above would only have tested rejections
        assert accepted[0] < 20 < accepted[1]


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("seed", range(2))
def test_adversarial_draft_changes_nothing(seed: int, exact: bool, engine: Engine, plain_texts: PlainTexts) -> None:
    """Every mixture of right and wrong tokens, so that each number of kept rows occurs, across the 512-key bucket."""
    params = SamplingParams(max_new_tokens=200, ignore_eos=True)
    prompt_ids = engine.tokenize("abc" * 135)
    assert len(prompt_ids) < 512 - 100 < 512 + 90 < len(prompt_ids) + params.max_new_tokens
    plain = plain_texts(prompt_ids=prompt_ids, params=params, exact=False)
    assert len(set(plain.token_ids)) > 50
    truth = [*prompt_ids, *plain.token_ids]
    fake = type(engine)(
        target=engine.target,
        drafter=ScriptedDrafter(truth, seed),
        tokenizer=engine.tokenizer,
        eos_ids=engine.eos_ids,
        info=engine.info,
    )
    # Whole blocks: what pays depends on how busy the machine is, and every length has to occur.
    drafted = fake.generate(prompt_ids=prompt_ids, params=params, exact=exact, drafting=Drafting(fixed=True))
    assert drafted.token_ids == plain.token_ids
    assert set(drafted.stats.acceptance_lengths) == set(range(1, 9))


EXTRAS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "top_k": {"temperature": 0.8, "top_k": 20, "seed": 5},
    "nucleus": {"temperature": 1.2, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.3, "seed": 2**62},
    "penalties": {"presence_penalty": 1.0, "frequency_penalty": 0.5, "logit_bias": {65: 3.0, 66: float("-inf")}},
}
WIDTHS = (1, 2, 5, 8)


@pytest.mark.parametrize(
    ("width", "extra"), [(None, extra) for extra in EXTRAS] + list(zip(WIDTHS, reversed(EXTRAS), strict=True))
)
def test_same_text_at_any_width(trained: Engine, plain_texts: PlainTexts, width: int | None, extra: str) -> None:
    """Draws are keyed by position and penalties see the hypothetical prefix: how much was proposed must not show. Every
    way to sample at full width, every other width with one of them: rows are filtered one by one."""
    params = SamplingParams(max_new_tokens=GREEDY.max_new_tokens, ignore_eos=True, **EXTRAS[extra])
    plain = plain_texts(PROMPTS[0], params)
    drafted = trained.generate(PROMPTS[0], params, drafting=Drafting(fixed=True, width=width))
    assert drafted.token_ids == plain.token_ids
    assert max(drafted.stats.acceptance_lengths) <= (width or 8)
    assert len(drafted.stats.proposed_per_slot) == (width or 8) - 1
    by_cost = (Drafting(width=width), Drafting(width=width, mode="fast", draws=False))
    for choice in by_cost if width is None else by_cost[width % 2 :][:1]:
        chosen = trained.generate(PROMPTS[0], params, drafting=choice)
        assert chosen.token_ids == plain.token_ids
        assert max(chosen.stats.rows) <= (width or 16)


def test_a_choice_at_load_is_that_of_every_request(
    open_engine: OpenEngine, target_folder: Path, trained_folder: Path, plain_texts: PlainTexts
) -> None:
    """Fault: how to draft is taken when loading and forgotten."""
    pair = open_engine(target_folder, trained_folder, drafting=Drafting(fixed=True, width=5))
    drafted = pair.generate(PROMPTS[0], GREEDY)
    assert drafted.token_ids == plain_texts(PROMPTS[0]).token_ids
    assert len(drafted.stats.proposed_per_slot) == 4
    pair.close()


def test_seed_matters(engine: Engine) -> None:
    """Otherwise the equality of sampled texts above would be empty."""
    texts = {engine.generate("hi", SamplingParams(temperature=1.0, seed=seed)).text for seed in range(4)}
    assert len(texts) == 4


def test_bf16_is_exact_where_the_probe_says_so(
    open_engine: OpenEngine, target_folder: Path, trained_folder: Path
) -> None:
    """In bf16 near-ties are frequent; only forwards of the same width class give the same text (docs/exactness.md)."""
    pair = open_engine(target_folder, trained_folder, dtype="bfloat16")
    assert pair.info.dtype == "bfloat16"
    if not pair.info.exact:
        assert pair.info.exactness is not None
        pytest.skip(f"not possible on this device: {pair.info.exactness.reason}")
    for prompt in PROMPTS:
        assert pair.generate(prompt, GREEDY).token_ids == pair.generate(prompt, GREEDY, use_draft=False).token_ids


@pytest.mark.parametrize("exact", [False, True])
def test_rollback_oracle(exact: bool, engine: Engine) -> None:
    """Prefill, verify, keep k rows, one more step: every k gives what a session gives that was only ever fed these."""
    target = engine.target
    prompt, block, following = ([(7 * i + seed) % 250 for i in range(n)] for seed, n in ((1, 11), (3, 6), (5, 3)))
    for kept in range(len(block) + 1):
        session, fresh = target.session(exact=exact), target.session(exact=exact)
        session.prefill(prompt)
        session.verify(block[0], Proposal(tuple(block[1:])))
        session.commit(range(kept))
        fresh.prefill([*prompt, *block[:kept]])
        ours, expected = (one.verify(following[0], Proposal(tuple(following[1:]))) for one in (session, fresh))
        for mine, theirs in ((ours.logits, expected.logits), (ours.features, expected.features)):
            np.testing.assert_allclose(np.asarray(mine), np.asarray(theirs), rtol=1e-4, atol=1e-4)
        session.close()
        fresh.close()


def test_backends_say_the_same(target_folder: Path, trained_folder: Path) -> None:
    """The same files give the same tokens in the same rounds, whichever library computes them."""
    pytest.importorskip("mlx.core", reason="needs MLX: pip install 'dflash[mlx]' (Linux: 'dflash[mlx-cpu]')")
    fixed = Drafting(fixed=True)
    pairs = [open_engine(target_folder, trained_folder, drafting=fixed) for open_engine in BACKENDS.values()]
    for prompt in PROMPTS:
        for params in (GREEDY, SAMPLED):
            first, second = (pair.generate(prompt, params) for pair in pairs)
            assert first.token_ids == second.token_ids
            assert first.stats.acceptance_lengths == second.stats.acceptance_lengths
    for pair in pairs:
        pair.close()


# Requests leave no trace


class Overheard:
    """A drafter's session whose proposals are written down."""

    def __init__(self, session: Any, heard: list[tuple[int, ...]]) -> None:
        self._session, self._heard = session, heard
        self.max_proposal: int = session.max_proposal

    def observe(self, token_ids: Sequence[int], features: Any) -> None:
        self._session.observe(token_ids, features)

    def propose(self, anchor: int, budget: int) -> Proposal:
        proposal: Proposal = self._session.propose(anchor, budget)
        self._heard.append(tuple(proposal.tokens))
        return proposal


def test_a_b_a(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """State kept in module or engine shows when a request is repeated after another one: in its text, or in what is
    proposed (a drafter that remembers would still give the right text)."""
    fixed = Drafting(fixed=True)  # by cost, the second request would know more than the first
    heard: list[tuple[int, ...]] = []
    drafter: Any = engine.drafter
    original = drafter.session
    monkeypatch.setattr(drafter, "session", lambda: Overheard(original(), heard))
    first, proposed = engine.generate(PROMPTS[0], GREEDY, drafting=fixed), tuple(heard)
    engine.generate(PROMPTS[2], SAMPLED, drafting=fixed)
    heard.clear()
    again = engine.generate(PROMPTS[0], GREEDY, drafting=fixed)
    assert again.token_ids == first.token_ids
    assert again.stats.acceptance_lengths == first.stats.acceptance_lengths
    assert len(proposed) > 3
    assert tuple(heard) == proposed


@pytest.mark.parametrize("num_events", [0, 1, 2, 5])
def test_cancelled_request_leaves_no_trace(num_events: int, engine: Engine, plain_texts: PlainTexts) -> None:
    """Ctrl-C at any round, then reuse; what was shown is a prefix of the whole."""
    whole = plain_texts(PROMPTS[0], GREEDY)
    stream = engine.stream(PROMPTS[0], GREEDY)
    events = [next(stream) for _ in range(num_events)]
    stream.close()
    if events:
        assert events[-1].stats.finish_reason == "cancelled"
    ids = [token for event in events for token in event.token_ids]
    assert ids == whole.token_ids[: len(ids)]
    assert engine.generate(PROMPTS[0], GREEDY).token_ids == whole.token_ids


def test_interleaved_requests(engine: Engine) -> None:
    """Two open streams share weights and hooks only."""
    alone = [engine.generate(prompt, GREEDY).token_ids for prompt in PROMPTS[:2]]
    streams = [engine.stream(prompt, GREEDY) for prompt in PROMPTS[:2]]
    together: list[list[int]] = [[], []]
    running = [0, 1]
    while running:
        for index in list(running):
            event = next(streams[index], None)
            if event is None:
                running.remove(index)
            else:
                together[index] += event.token_ids
    assert together == alone


def test_two_engines_in_one_process(
    open_engine: OpenEngine, engine: Engine, draft_folder: Path, tmp_path: Path
) -> None:
    """Globals or class patches would mix two targets, or break the first when the second is closed."""
    alone = engine.generate(PROMPTS[0], GREEDY).token_ids
    other = open_engine(save_target(tmp_path, seed=7), draft_folder)
    mine, theirs = engine.stream(PROMPTS[0], GREEDY), other.stream(PROMPTS[0], GREEDY)
    mixed = [next(mine).token_ids, next(theirs).token_ids]
    assert mixed[0] == tuple(alone[: len(mixed[0])])
    other_alone = other.generate(PROMPTS[0], GREEDY, use_draft=False).token_ids
    theirs.close()
    other.close()
    assert other_alone != alone
    assert [*mixed[0], *(token for event in mine for token in event.token_ids)] == alone


def test_two_drafts_on_one_kind_of_target(
    open_engine: OpenEngine, target_folder: Path, trained_folder: Path, tmp_path: Path
) -> None:
    """Globals or class patches would give one draft the layers that the other one taps, its block or its proposals:
    with two drafts that differ in all of them, in turn, every round is what it is alone."""
    other = random_draft(tiny_pair.draft_config(target_layer_ids=(1, 2), block_size=6), seed=4)
    folders = (trained_folder, save_draft(tmp_path / "other", other))

    def opened(folder: Path) -> Engine:
        return open_engine(target_folder, folder, drafting=Drafting(fixed=True))

    alone = []
    for folder in folders:
        pair = opened(folder)
        alone.append(watched(pair))
        alone[-1][1].extend(seen(event) for event in pair.stream(PROMPTS[0], GREEDY))
        pair.close()
    pairs = [opened(folder) for folder in folders]
    together = [watched(pair) for pair in pairs]
    streams = [pair.stream(PROMPTS[0], GREEDY) for pair in pairs]
    running = [0, 1]
    while running:
        for index in list(running):
            event = next(streams[index], None)
            if event is None:
                pairs[index].close()  # the other one goes on
                running.remove(index)
            else:
                together[index][1].append(seen(event))
    assert together == alone
    (first, _), (second, _) = alone
    assert len(first) > 3 and len(second) > 3
    assert {len(proposal) for proposal in first} != {len(proposal) for proposal in second}


def watched(pair: Engine) -> tuple[list[tuple[int, ...]], list[Any]]:
    """(what the engine's draft will propose, room for its rounds)."""
    proposals: list[tuple[int, ...]] = []
    assert pair.drafter is not None
    make = pair.drafter.session

    def session() -> Any:
        made = make()
        propose = made.propose

        def recorded(anchor: int, budget: int) -> Proposal:
            proposal = propose(anchor, budget)
            proposals.append(tuple(proposal.tokens))
            return proposal

        made.propose = recorded  # type: ignore[method-assign]
        return made

    pair.drafter.session = session  # type: ignore[method-assign]
    return proposals, []


def seen(event: StreamEvent) -> tuple[tuple[int, ...], int, int]:
    return event.token_ids, event.round.num_proposed, event.round.num_accepted


# The request's life


def test_end_ids_come_from_the_generation_config(open_engine: OpenEngine, tmp_path: Path) -> None:
    """Real targets have lists of end ids; all count."""
    engine = open_engine(save_target(tmp_path, eos_token_id=[END, 7, 9]), None)
    assert engine.eos_ids == {END, 7, 9}


def test_context_end(open_engine: OpenEngine, target_folder: Path, draft_folder: Path) -> None:
    """The context fills inside a block: the last token is emitted, the next forward would be out of range."""
    pair = open_engine(target_folder, draft_folder)
    ids = [3] * (tiny_pair.CONTEXT - 11)
    results = [pair.generate(prompt_ids=ids, params=GREEDY, use_draft=use) for use in (True, False)]
    assert results[0].token_ids == results[1].token_ids
    assert [result.stats.finish_reason for result in results] == ["length", "length"]
    assert len(results[0].token_ids) == 11
    pair.close()


# Prompts and information


def test_prompt_forms(engine: Engine) -> None:
    """A string is one user message, raw is not; ids are taken as they are."""
    ids = engine.tokenize("hi")
    assert ids == engine.tokenize([{"role": "user", "content": "hi"}])
    assert ids[0] == tiny_pair.USER
    assert ids[-1] == tiny_pair.ASSISTANT
    raw = engine.tokenize("hi", raw=True)
    assert len(raw) == 2
    assert engine.generate("hi", GREEDY).token_ids == engine.generate(prompt_ids=ids, params=GREEDY).token_ids
    assert engine.generate("hi", GREEDY, raw=True).token_ids == engine.generate(prompt_ids=raw, params=GREEDY).token_ids


def test_info(engine: Engine, draft_folder: Path) -> None:
    """Records must say what ran."""
    info = engine.info
    assert info.draft_sha256 == file_sha256(draft_folder / "model.safetensors")
    machine = ("mlx cpu", None) if info.device.startswith("mlx") else ("cpu", 1)
    assert (info.block_size, info.dtype, info.device, info.num_threads) == (8, "float32", *machine)
    assert info.exactness is not None
    assert torch.get_num_threads() == 1


def test_stats_are_shared_by_events(engine: Engine) -> None:
    """A consumer that keeps only the last event has all figures."""
    events = list(engine.stream("hi", GREEDY))
    assert isinstance(events[0].stats, Stats)
    assert all(event.stats is events[0].stats for event in events)
    assert events[0].round.num_proposed == 0
