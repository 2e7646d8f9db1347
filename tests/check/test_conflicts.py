"""All contradictions of a config at once; special tokens that are not the target's; nothing where all is well."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from dflash.check.conflicts import code_note, config_conflicts
from dflash.core.pair_checks import TargetTokens, raw_config, token_findings, warn
from tests.backends.tiny_pair import draft_config

TOKENS = TargetTokens(eos_ids={2, 5}, bos_id=1, pad_id=0)


def config(**changes: Any) -> dict[str, Any]:
    return draft_config().to_json() | changes


def test_a_good_config_has_none() -> None:
    """Guards against false alarms, also on values that are rightly stated twice."""
    raw = config(eagle_aux_hidden_state_layer_ids=[1, 3], mask_token_id=259, rope_parameters={"rope_theta": 10000.0})
    assert config_conflicts(raw) == []
    by_kind = {"full_attention": {"rope_theta": 10000.0}, "sliding_attention": {"rope_theta": 500.0}}
    assert config_conflicts(config(rope_parameters=by_kind)) == []
    assert config_conflicts(config(eagle_aux_hidden_state_layer_ids=[1, 3, 4])) == [], (
        "the final state, behind the taps"
    )


def test_all_of_them_are_listed() -> None:
    """Guards against a report that stops at the first: each of these is one the field has seen."""
    raw = config(
        mask_token_id=7,
        eagle_aux_hidden_state_layer_ids=[0, 2],
        rope_parameters={"rope_theta": 1e7},
        layer_types=["full_attention"],
    )
    found = config_conflicts(raw)
    assert [finding.subject for finding in found] == ["mask_token_id", "taps", "rope", "layers"]
    assert all(finding.severity == "error" for finding in found)
    assert "1e+07" in found[2].message


def test_code_is_mentioned_and_not_run() -> None:
    """Guards against silence about code that comes with a checkpoint."""
    (note,) = code_note(config(auto_map={"AutoModel": "evil.Model"}))
    assert note.severity == "note"
    assert code_note(config()) == []


@pytest.mark.parametrize(("mask", "severity"), [(5, "warning"), (0, "note"), (1, "note"), (9, None)])
def test_a_mask_id_that_means_something(mask: int, severity: str | None) -> None:
    """Guards against a mask id that is one of several end tokens (only one of them is in the draft's config)."""
    found = token_findings(mask, {"eos_token_id": 2}, TOKENS)
    assert [finding.severity for finding in found] == ([] if severity is None else [severity])


def test_special_ids_of_another_target() -> None:
    """Guards against a draft of another model that happens to fit in shape; one common end token is enough."""
    found = token_findings(9, {"eos_token_id": [7, 8], "bos_token_id": 3, "pad_token_id": None}, TOKENS)
    assert [finding.subject for finding in found] == ["special ids", "special ids"]
    assert token_findings(9, {"eos_token_id": [5, 8], "bos_token_id": 1}, TOKENS) == []
    assert token_findings(9, {"bos_token_id": 3}, TargetTokens(eos_ids=())) == []


def test_warnings_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Guards against cheap checks that run at load and tell nobody."""
    with caplog.at_level(logging.INFO, "dflash"):
        warn([*token_findings(5, {}, TOKENS), *token_findings(0, {}, TOKENS)])
    assert len(caplog.records) == 1
    assert "mask id 5" in caplog.text


def test_a_config_that_cannot_be_read_is_the_readers_business(tmp_path: Path) -> None:
    """Guards against a crash before the reader can say what is wrong."""
    assert raw_config(tmp_path) == {}
    (tmp_path / "config.json").write_text("[" * 100_000)
    assert raw_config(tmp_path) == {}
    (tmp_path / "config.json").write_text('{"a": 1}')
    assert raw_config(tmp_path) == {"a": 1}
