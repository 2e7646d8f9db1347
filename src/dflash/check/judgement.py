"""From the probe's figures to findings: which of them mean that a draft is misread, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator

from dflash.check.measures import Paired
from dflash.check.probe import EARLIER, LATER, OTHER_READING, Figures
from dflash.core.findings import Finding

LEAST_PLACES = 20
"""Fewer places say nothing."""
SCALE_FAULT = 2.0
"""Fitted temperatures beyond this factor from 1 are more than the ordinary over- or under-confidence of a draft."""
REPLAY_SHARE = 0.1
"""Share of rounds in which the loop may have fewer guesses right than fresh states: rounding of near-ties."""


def can_judge(figures: Figures | None) -> bool:
    """Whether the probe saw enough to say anything about acceptance, anchor and taps; None = it did not run."""
    return figures is not None and figures.num_places >= LEAST_PLACES


def judge(figures: Figures) -> list[Finding]:
    """All findings; errors where the draft must not be used as it is configured."""
    if not can_judge(figures):
        return [
            Finding(
                "warning",
                "probe",
                f"only {figures.num_places} places were probed, and fewer than {LEAST_PLACES} say nothing about "
                "acceptance, anchor and taps; raise --max-new-tokens or give other prompts with --prompts.",
            )
        ]
    return [*_variants(figures), *_noise(figures), *_temperature(figures), *_replay(figures)]


def _variants(figures: Figures) -> Iterator[Finding]:
    cures = {
        OTHER_READING: (
            "anchor",
            "the draft works better when its anchor slot is read the other way; state sample_from_anchor in its "
            "config.json accordingly",
        ),
        EARLIER: ("taps", "the draft works better with every tap one layer earlier; correct its list of taps"),
        LATER: ("taps", "the draft works better with every tap one layer later; correct its list of taps"),
    }
    for name, compared in figures.comparisons().items():
        if compared.is_better:
            subject, cure = cures[name]
            yield Finding("error", subject, f"{cure} ({_figures(figures, compared)}).")


def _figures(figures: Figures, compared: Paired) -> str:
    return f"{compared.mean:.2f} instead of {figures.agreement:.2f} tokens per guess at {figures.num_places} places"


def _noise(figures: Figures) -> Iterator[Finding]:
    if figures.is_noise:
        yield Finding(
            "error",
            "acceptance",
            f"the first guess is right at {figures.first_slot:.1%} of {figures.num_places} places, which is noise: the "
            "draft belongs to another target, or one of the values above is not what it was trained with.",
        )


def _temperature(figures: Figures) -> Iterator[Finding]:
    fit = figures.temperature()
    if fit is not None and not 1 / SCALE_FAULT <= fit.theta <= SCALE_FAULT and not figures.is_noise:
        yield Finding(
            "warning",
            "temperature",
            f"the draft's probabilities fit at temperature {fit.theta:.2g}, far from 1: a scale of its logits "
            "(output_multiplier, final_logit_softcapping) is probably missing. Greedy guesses are not affected, trees "
            "and adaptive lengths are.",
        )


def _replay(figures: Figures) -> Iterator[Finding]:
    pairs = list(zip(figures.looped, figures.replayed, strict=True))
    fewer = sum(loop < fresh for loop, fresh in pairs)
    if len(pairs) >= LEAST_PLACES and fewer > REPLAY_SHARE * len(pairs):
        yield Finding(
            "error",
            "draft state",
            f"in {fewer} of {len(pairs)} rounds the decoding loop had fewer guesses right than the same draft on fresh "
            "states: its context is not kept properly, please report this.",
        )
