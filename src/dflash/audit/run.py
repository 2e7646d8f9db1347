"""`dflash audit` as a function: is decoding with this draft lossless on this machine, and how far is that proven?"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

from dflash.audit.forms import Form, forms_of
from dflash.audit.oracle import Oracle, open_oracle
from dflash.audit.recorder import LayerRecorder
from dflash.audit.sampling import LawTest, decisions_on_one_block, runs_from_the_start
from dflash.audit.states import RollbackAudit, WidthAudit, audit_rollback, audit_widths
from dflash.audit.texts import TextAudit, audit_texts, same_seed_same_text
from dflash.audit.trees import TreeAudit, audit_trees
from dflash.core.engine import Engine
from dflash.core.engine_info import EngineInfo
from dflash.core.textshare import TextShare, pooled
from dflash.errors import ConfigError
from dflash.resolve import Progress

SHORT_PROMPT = 24
LONGEST_PROMPT = 600
"""Rolling back is tested behind this many tokens at most, however wide a window is."""
DECISIONS_PER_RUN = 25
"""Decisions on one block are so much cheaper than whole runs."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """How much is tried."""

    max_new_tokens: int = 48
    num_runs: int = 32
    """Sampled generations of the chi-square test."""


@dataclass(frozen=True, kw_only=True)
class AuditReport:
    """What was tried and what came out."""

    info: EngineInfo
    widths: WidthAudit
    rollbacks: Sequence[RollbackAudit]
    """Behind a short prompt; behind one longer than the target's window, if it has one."""
    trees: Sequence[TreeAudit]
    """Behind the same prompts; empty where a layer's state cannot hold branches."""
    window: int | None
    window_covered: bool
    """Whether the longer prompt left the window (False only if there is one that is too wide to try)."""
    texts: Sequence[TextAudit]
    """Every prompt in every form of drafting."""
    seed_difference: int | None
    """Where sampled texts of one seed part; None if they do not."""
    laws: Sequence[LawTest]
    """Whole runs; decisions on one block."""
    must_agree: bool
    """Whether equality is promised here: in float32, and wherever the width class holds."""

    @property
    def share(self) -> TextShare:
        """Loops and copies in the texts of the first form (the others are the same, or a fault)."""
        return pooled(text.share for text in self.texts if text.form == self.texts[0].form)

    @property
    def passed(self) -> bool:
        """Whether nothing worse than near-ties was found."""
        parts = [rollback.passed for rollback in self.rollbacks]
        parts += [tree.passed for tree in self.trees]
        parts += [text.passed for text in self.texts]
        parts += [law.passed for law in self.laws]
        same_seed = self.seed_difference is None or not self.info.exact
        return self.widths.passed and all(parts) and same_seed

    @property
    def failures(self) -> list[str]:
        """One sentence per fault."""
        found: list[str] = []
        if not self.widths.passed:
            found.append(
                f"{self.widths.num_rows - self.widths.num_equal} of {self.widths.num_rows} rows differ between single "
                f"steps and blocks, first in {self.widths.first_layer}, although the width class is said to hold."
            )
        for rollback in self.rollbacks:
            found += [
                f"layer {fault.layer} ({fault.kind}) is wrong by {fault.error:.2g} after keeping {fault.kept} of "
                f"{fault.fed} rows: rejected rows left a trace, or kept ones are missing."
                for fault in rollback.faults[:1]
            ]
            if rollback.oracle_error > rollback.oracle_tolerance:
                found.append(
                    f"after rolling back, logits are {rollback.oracle_error:.2g} from the bare model's (rounding "
                    f"explains {rollback.oracle_tolerance:.2g}): mask, positions or states are wrong."
                )
        found += [
            f"in a tree, logits along the rows {tree.path} are {tree.error:.2g} from the bare model's (rounding "
            f"explains {tree.tolerance:.2g}): a branch sees another one, or the kept path is not all that stays."
            for tree in self.trees
            if not tree.passed
        ]
        for text in self.texts:
            found += _text_failures(text)
        if self.info.exact and self.seed_difference is not None:
            found.append(f"sampled texts of one seed part at token {self.seed_difference}.")
        for name, law in zip(("whole runs", "decisions on one block"), self.laws, strict=True):
            if not law.passed:
                found.append(f"sampled tokens do not have the target's law ({name}: p = {law.p_value:.1g}).")
        return found


def _text_failures(text: TextAudit) -> list[str]:
    found = []
    one, stranger = text.difference, text.stranger
    if one is not None and one.verdict == "fault":
        found.append(
            f"{text.prompt}, {text.form}: from token {one.position} on {one.drafted!r} instead of {one.plain!r}, "
            f"{one.distance:.3g} below the best token (rounding explains {one.tolerance:.2g}); equality was promised "
            "or this is no tie."
        )
    if stranger is not None:
        found.append(
            f"{text.prompt}, {text.form}: token {stranger.position} {stranger.token!r} is {stranger.distance:.3g} "
            f"below what the bare model says (rounding explains {stranger.tolerance:.2g})."
        )
    return found


def audit(
    engine: Engine,
    prompts: Sequence[tuple[str, Sequence[int]]],
    workload: Workload | None = None,
    *,
    progress: Progress | None = None,
) -> AuditReport:
    """Audit a loaded engine.

    Args:
        prompts: (name, token ids) of what is answered; at least one.
        workload: how much is tried.
        progress: told what is being done and which share of it is finished.

    Raises ConfigError without a draft and for quantised keys and values, PromptError for a prompt that is too long.
    """
    if engine.drafter is None:
        raise ConfigError("there is no draft to audit: name one, or train one with `dflash train`.")
    work = workload or Workload()
    report = progress or (lambda what, share: None)
    oracle = open_oracle(engine)
    has_trees = _supports_trees(engine)
    forms = forms_of(engine, supports_trees=has_trees)
    must_agree = engine.info.exact or engine.info.dtype == "float32"
    states = _states(engine, oracle, report, has_trees=has_trees)
    texts = []
    for index, (name, ids) in enumerate(prompts):
        report("comparing texts", index / len(prompts))
        texts += audit_texts(engine, oracle, name, ids, work.max_new_tokens, forms, must_agree=must_agree)
    return AuditReport(
        info=engine.info,
        widths=states.widths,
        rollbacks=states.rollbacks,
        trees=states.trees,
        window=engine.target.widest_window,
        window_covered=states.window_covered,
        texts=texts,
        seed_difference=same_seed_same_text(engine, prompts[0][1], work.max_new_tokens, forms),
        laws=_laws(engine, forms, oracle, prompts, (work.num_runs, report)),
        must_agree=must_agree,
    )


@dataclass(frozen=True)
class _States:
    """What was found about layer states."""

    widths: WidthAudit
    rollbacks: Sequence[RollbackAudit]
    trees: Sequence[TreeAudit]
    window_covered: bool


def _states(engine: Engine, oracle: Oracle, report: Progress, *, has_trees: bool) -> _States:
    """Bits of forwards of different widths; states after rejected rows and kept branches."""
    # A drafter without a block feeds as many rows as were checked.
    exact, width = engine.info.exact, engine.info.width or engine.info.block_size or engine.max_rows
    promised = engine.info.exactness.width if exact and engine.info.exactness is not None else None
    window = engine.target.widest_window
    lengths = _prompt_lengths(engine, window, width)
    rollbacks, trees = [], []
    report("comparing forward widths", 0.0)
    with (
        closing(LayerRecorder(engine, exact=True, exact_width=1)) as unpadded,
        closing(LayerRecorder(engine, exact=exact)) as decoding,
    ):
        widths = audit_widths(unpadded, decoding, max_width=max(16, width), promised=promised)
        report("comparing forward widths", 1.0)
        for index, length in enumerate(lengths):
            report("rolling rejected rows back", index / len(lengths))
            rollbacks.append(
                audit_rollback(decoding, oracle, prompt_length=length, width=max(width, 4), bit_exact=exact)
            )
            if has_trees:
                trees.append(audit_trees(decoding, oracle, prompt_length=length))
    return _States(widths, rollbacks, trees, window is None or lengths[-1] > window)


def _laws(
    engine: Engine,
    forms: Sequence[Form],
    oracle: Oracle,
    prompts: Sequence[tuple[str, Sequence[int]]],
    work: tuple[int, Progress],
) -> list[LawTest]:
    num_runs, report = work
    shortest = min((ids for _, ids in prompts), key=len)  # every run feeds it again
    done = 0

    def tick() -> None:
        nonlocal done
        done += 1
        report("sampling", done / (num_runs + 1))

    whole = runs_from_the_start(forms, oracle, shortest, num_runs, tick)
    block = decisions_on_one_block(engine, oracle, shortest, DECISIONS_PER_RUN * num_runs)
    report("sampling", 1.0)
    return [whole, block]


def _supports_trees(engine: Engine) -> bool:
    session = engine.target.session(features=False)
    try:
        return session.supports_trees
    finally:
        session.close()


def _prompt_lengths(engine: Engine, window: int | None, width: int) -> list[int]:
    room = engine.target.max_length - 4 * max(width, 4)
    lengths = [min(SHORT_PROMPT, room)]
    if window is not None:
        lengths.append(min(2 * window + 3, LONGEST_PROMPT, room))
    return lengths
