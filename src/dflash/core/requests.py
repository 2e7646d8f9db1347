"""What a caller may ask of an engine: prompts, token ids and choices of the right kind, or an error in words.

Knows types, not models: whether a prompt fits into the context is told by the target's session.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from dflash import arguments
from dflash.errors import ConfigError, PromptError
from dflash.types import Drafting, SamplingParams

Prompt = str | Sequence[Mapping[str, str]]
"""One user message, or a conversation of {"role": ..., "content": ...} messages."""

_CONVERSATION = 'a conversation is a non-empty list of {"role": ..., "content": ...} with texts.'


def check_request(
    params: object,
    drafting: object = None,
    *,
    use_draft: object = True,
    exact: object = None,
    raw: object = False,
    profile: object = False,
    vocab_size: int,
) -> None:
    """Raise ConfigError unless these are arguments of `Engine.stream`, for a target with this many tokens."""
    arguments.check_instance("params", params, SamplingParams)
    arguments.check_instance("drafting", drafting, Drafting, optional=True)
    arguments.check_flag("exact", exact, optional=True)
    for name, value in (("use_draft", use_draft), ("raw", raw), ("profile", profile)):
        arguments.check_flag(name, value)
    assert isinstance(params, SamplingParams)
    arguments.check_token_ids("stop_token_ids", params.stop_token_ids, vocab_size)


def messages_of(prompt: object) -> list[dict[str, str]]:
    """The messages of a prompt. Raises PromptError for what is neither a text nor a conversation."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if isinstance(prompt, bytes | Mapping) or not isinstance(prompt, Iterable):
        raise PromptError(f"a prompt is a text or a list of messages, not {type(prompt).__name__}.")
    messages: list[dict[str, str]] = []
    for message in prompt:
        if not isinstance(message, Mapping):
            raise PromptError(_CONVERSATION)
        messages.append(dict(message))
    if not messages or any(not isinstance(m.get(key), str) for m in messages for key in ("role", "content")):
        raise PromptError(_CONVERSATION)
    return messages


def token_ids_of(prompt_ids: object, vocab_size: int, target_name: str) -> list[int]:
    """Token ids given in place of a prompt. Raises PromptError unless they are ids of this vocabulary."""
    try:
        arguments.check_token_ids("prompt_ids", prompt_ids)
    except ConfigError as error:
        raise PromptError(str(error)) from error
    assert isinstance(prompt_ids, Iterable)
    ids = [int(token) for token in prompt_ids]
    if wrong := [token for token in ids if token >= vocab_size]:
        raise PromptError(
            f"token id {wrong[0]} lies outside the vocabulary of '{target_name}' "
            f"({vocab_size} tokens); use ids of its own tokenizer."
        )
    return ids


def encodable(text: str) -> str:
    """`text`, if it is text. Bytes of another encoding on a command line arrive as lone surrogates, which no tokenizer
    takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise PromptError(
            f"the prompt is not valid Unicode (at character {error.start + 1}); give it in UTF-8."
        ) from error
    return text
