"""From a conversation to what a target is fed: its chat template where it has one, plain text for base models."""

from __future__ import annotations

from dflash.core.engine import Engine
from dflash.prepare.prompts import Conversation


def prompt_ids(engine: Engine, prompt: Conversation) -> list[int]:
    """Token ids of the first turn. Raises PromptError if the template refuses it."""
    if engine.tokenizer.chat_template:
        return engine.tokenize(prompt.opening())
    return engine.tokenize(prompt.turns[0], raw=True)
