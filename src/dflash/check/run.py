"""`dflash check` as a function: read, describe, load and probe a pair; say whether it is usable, and if not, why."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dflash.check.conflicts import code_note, config_conflicts, idle_counts
from dflash.check.description import PairFacts, Row, describe
from dflash.check.judgement import can_judge, judge
from dflash.check.pair import PairSubject
from dflash.check.probe import Figures, probe
from dflash.check.prompts import prompt_ids
from dflash.core.draft_reader import DraftDescription, read_draft
from dflash.core.eagle3_config import tap_findings
from dflash.core.engine import Engine
from dflash.core.findings import Finding, has_errors
from dflash.core.pair_checks import TargetTokens, raw_config, token_findings
from dflash.core.published import published_as
from dflash.errors import CheckpointError, ConfigError, PairError, UnsupportedModel
from dflash.prepare.prompts import Conversation
from dflash.registry import MODEL_FREE_DRAFTERS, backend_loader
from dflash.resolve import AUTO, Progress, resolve_draft, resolve_target

MAX_NEW_TOKENS = 32


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """Everything that was found out about a pair."""

    target: str
    draft: str
    rows: Sequence[Row] = ()
    """The resolved description; empty if the draft could not be read or loaded."""
    findings: Sequence[Finding] = ()
    figures: Figures | None = field(default=None, repr=False)
    """None: the probe did not run, because something before it failed."""

    @property
    def usable(self) -> bool:
        """Whether nothing that was judged speaks against using the pair."""
        return not has_errors(self.findings)

    @property
    def acceptance_judged(self) -> bool:
        """Whether the probe saw enough to judge acceptance, anchor and taps."""
        return can_judge(self.figures)


def check(
    target: str,
    draft: str = AUTO,
    *,
    prompts: Sequence[Conversation],
    backend: str = "torch",
    max_new_tokens: int = MAX_NEW_TOKENS,
    progress: Progress | None = None,
    **options: Any,
) -> CheckReport:
    """Check a pair.

    Args:
        target, draft: as for `dflash.load`.
        backend: what computes (`registry.BACKENDS`).
        prompts: what the probe answers, with `max_new_tokens` tokens each at most.
        options: dtype, device, num_threads and trust_remote_code of the backend's `load`.

    Raises:
        ModelError: target or draft cannot be found, ConfigError, PromptError: as `dflash.load` and `Engine.generate`;
            also ConfigError for a drafter without a model, of which there is nothing to read.
            A pair that is found but cannot be used is no error: the report says why.
    """
    report = progress or (lambda what, share: None)
    if draft in MODEL_FREE_DRAFTERS:
        raise ConfigError(
            f"'{draft}' has no model that could be read wrongly, so there is nothing to check; `dflash audit` shows "
            "that it changes no text, `dflash bench` what it brings."
        )
    load = backend_loader(backend)
    code = bool(options.get("trust_remote_code", False))
    target_source = resolve_target(os.fspath(target), allow_code=code, progress=report)
    draft_source = resolve_draft(os.fspath(draft), target_source, progress=report)
    raw = raw_config(draft_source.path)
    findings = [*config_conflicts(raw), *code_note(raw)]
    try:
        description = read_draft(draft_source.path)
        findings += idle_counts(draft_source.path, description.config)
        engine = load(target, draft, progress=report, **options)
    except (CheckpointError, PairError, UnsupportedModel) as error:
        if not has_errors(findings):
            findings.append(Finding("error", "loading", str(error)))
        return CheckReport(target=target_source.name, draft=draft_source.name, findings=findings)
    try:
        return _check_loaded(engine, description, raw, findings, (prompts, max_new_tokens, report))
    finally:
        engine.close()


def _check_loaded(
    engine: Engine,
    description: DraftDescription,
    raw: Mapping[str, Any],
    findings: list[Finding],
    work: tuple[Sequence[Conversation], int, Progress],
) -> CheckReport:
    prompts, max_new_tokens, progress = work
    description = description.for_target(engine.target.num_layers)
    config, info = description.config, engine.info
    findings += [Finding("note", "reading", note) for note in description.notes]
    published = None if info.draft is None else published_as(info.draft)
    if published is not None:
        findings += [
            Finding("warning", "published", f"not as it was published: {difference}; pin a revision.")
            for difference in published.differences(config)
        ]
    findings += token_findings(config.mask_token_id, raw, TargetTokens.of_tokenizer(engine.tokenizer, engine.eos_ids))
    findings += tap_findings(config, engine.target.num_layers)
    mode = None if published is None or published.mode is None else f"{published.mode} (as published)"
    rows = describe(config, _facts(engine, description, mode))
    figures: Figures | None = None
    subject = PairSubject(engine, max_new_tokens)
    try:
        progress("probing", 0.0)
        for figures in probe(subject, [prompt_ids(engine, prompt) for prompt in prompts]):
            progress("probing", figures.num_prompts / len(prompts))
    finally:
        subject.close()
    if figures is not None:
        findings += judge(figures)
    assert info.draft is not None
    return CheckReport(target=info.target, draft=info.draft, rows=rows, findings=findings, figures=figures)


def _facts(engine: Engine, description: DraftDescription, mode: str | None) -> PairFacts:
    info, shared, config = engine.info, engine.target, description.config
    template = engine.tokenizer.chat_template
    vocabulary = description.vocabulary
    mask = str(engine.tokenizer.decode([config.mask_token_id])) if config.mask_token_id >= 0 else ""
    return PairFacts(
        target=info.target,
        target_revision=info.target_revision,
        target_class=shared.model_name,
        target_states=shared.layer_kinds,
        target_vocabulary=shared.vocab_size,
        target_hidden=shared.hidden_size,
        template_sha256=hashlib.sha256(str(template).encode()).hexdigest() if template else None,
        draft=info.draft or "",
        draft_revision=info.draft_revision,
        draft_sha256=info.draft_sha256,
        dialect=description.dialect,
        origins=description.origins,
        mask_token=mask,
        num_bigrams=info.num_bigrams,
        trained_for=mode,
        num_scored=len(set(range(shared.vocab_size) if vocabulary is None else vocabulary) - {config.mask_token_id}),
    )
