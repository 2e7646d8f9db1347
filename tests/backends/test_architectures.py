"""Every family of targets decodes losslessly, or is refused at load with the reason: the matrix.

Random weights, so that any wrongly kept, lost or shifted row changes the logits by far more than the tolerance; the
page docs/architectures.md lists the same rows.
"""

from __future__ import annotations

from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from dflash.backends.torch import compat
from dflash.backends.torch.target import TorchTarget
from dflash.errors import UnsupportedModel
from scripts.write_architectures import BEGIN, END, PAGE
from tests.backends.architectures import ARCHITECTURES, LOSSLESS, REFUSED, model_of
from tests.backends.matrix import (
    DRAFTERS,
    PROMPT,
    TOLERANCE,
    UNTAPPED,
    bare_layer_outputs,
    bare_logits,
    chunks_agree,
    error,
    kinds_of,
    rolls_back,
    same_text,
)


@pytest.fixture(params=LOSSLESS)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def model(family: str) -> PreTrainedModel:
    return model_of(family)


def test_rollback_oracle(model: PreTrainedModel) -> None:
    """Fault: rejected rows stay in some layer's state, kept ones are lost. Every kept count, prompts longer than the
    window, in both modes of decoding."""
    assert rolls_back(model)
    for wrong in (-4, -1):  # a single token elsewhere in the text makes a difference that could not be missed
        other = [*PROMPT]
        other[wrong] += 1
        assert error(bare_logits(model, other)[-1], bare_logits(model, PROMPT)[-1]) > 50 * TOLERANCE


def test_greedy_text_is_that_of_the_bare_model(model: PreTrainedModel) -> None:
    """Fault: the text depends on the drafter. 32 tokens, four windows deep."""
    assert same_text(model) == dict.fromkeys(("plain", *DRAFTERS), True)


def test_every_layer_can_be_tapped(family: str) -> None:
    """Fault: a layer that runs for the last row only in a prefill (Gemma 4's, which share keys and values): its one row
    stood for all of them, and a draft read noise."""
    model = model_of(family)
    for layer in range(model.config.get_text_config().num_hidden_layers):
        target = TorchTarget(model, taps=(layer,))
        if family in UNTAPPED:
            with pytest.raises(UnsupportedModel):
                target.session().prefill(PROMPT)
        else:
            features = target.session().prefill(PROMPT).features
            assert error(features, bare_layer_outputs(model, (layer,))) < TOLERANCE
        target.close()


def test_prefill_in_chunks(family: str) -> None:
    """Fault: a chunk sees wrong keys or starts from a wrong state; features of another layer or other rows."""
    assert chunks_agree(family)


@pytest.mark.parametrize("family", REFUSED)
def test_what_cannot_be_rolled_back_is_refused_at_load(family: str) -> None:
    """Fault: a model is taken whose text would depend on the drafter."""
    reason = ARCHITECTURES[family].refused
    assert reason is not None
    with pytest.raises(UnsupportedModel, match=reason):
        TorchTarget(model_of(family))


class StrangeCache(DynamicCache):
    """A cache class that some model might insist on."""


class StrangeDecoder(torch.nn.Module):
    """A decoder that does."""

    def forward(self, input_ids: torch.Tensor, cache: StrangeCache | None = None) -> torch.Tensor:
        return input_ids


def test_caches_of_their_own_are_stood_in_for_where_their_kind_is_known() -> None:
    """Fault: a model that insists on its own cache class gets another one and fails in the middle of a forward, or one
    that nobody can roll back."""
    own = compat.own_cache(model_of("MiniMax-Text-01"))
    assert own is not None
    assert own.__name__ == "MiniMaxCache"
    assert compat.own_cache(model_of("Llama")) is None
    target = TorchTarget(model_of("MiniMax-Text-01"))
    session = target.session()
    assert isinstance(session._cache, own)
    session.prefill(PROMPT)
    session.close()
    target.close()
    strange: Any = SimpleNamespace(get_decoder=StrangeDecoder)
    with pytest.raises(UnsupportedModel, match="StrangeCache of its own"):
        compat.own_cache(strange)


@pytest.mark.parametrize("family", UNTAPPED)
def test_drafts_are_refused_where_layers_return_several_streams(family: str) -> None:
    """Fault: a draft reads one of several streams, and nobody said which."""
    target = TorchTarget(model_of(family), taps=(0,))
    with pytest.raises(UnsupportedModel, match="2 streams of hidden states"):
        target.session().prefill(PROMPT)
    target.close()


def test_the_page_lists_what_the_tests_say() -> None:
    """Fault: the table of the page promises what no test checks, or leaves a family out."""
    page = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    rows = {
        cells[1]: cells[2:-1]
        for cells in ([cell.strip() for cell in line.split("|")] for line in page.split("\n")[3:])
        if cells[1:]
    }
    assert list(rows) == list(ARCHITECTURES), "run `python scripts/write_architectures.py`"
    for name in LOSSLESS:
        class_name, kinds, trees, *results = rows[name]
        assert class_name == f"`{ARCHITECTURES[name].model}`"
        assert kinds == ", ".join(kinds_of(model_of(name)))
        with closing(TorchTarget(model_of(name))) as target:
            assert trees == ("yes" if target.session().supports_trees else "no")
        assert results == ["yes"] * 5
    for name in REFUSED:
        assert rows[name][1].startswith("refused: ")
