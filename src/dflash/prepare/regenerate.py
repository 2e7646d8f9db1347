"""A target's own answers to a batch of prompts, through Transformers' `generate`.

Knows the chat template (and what is wrong with some), left padding, stop ids and the random stream of a
shard. Does not know files, shards or resuming: see run.py.

Answers follow the target's plain distribution: what a model's generation_config.json asks for beyond its stop
ids (top-k, top-p, repetition penalty, suppressed tokens, ...) is set aside, as decoding here does too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from jinja2 import TemplateError
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from dflash.backends.torch.compat import text_config
from dflash.backends.torch.loading import LoadedTarget, end_of_sequence_ids
from dflash.errors import ConfigError, DataError, ModelError
from dflash.prepare.prompts import Message

_PROBE_QUESTION = "dflash-probe-question"
_PROBE_ANSWER = "dflash-probe-answer"
_PROBE_SYSTEM = "dflash-probe-system"
_FINGERPRINT_VALUES = 64
"""Values read from each parameter to recognise a model's weights: enough for any training step to show."""


class Answerer:
    """One loaded target that answers batches of prompts; templates render as in `Engine.tokenize`."""

    def __init__(
        self,
        target: LoadedTarget,
        *,
        max_new_tokens: int,
        temperature: float,
        system: str | None = None,
        raw: bool = False,
    ) -> None:
        """Check template and stop ids.

        Raises:
            ModelError: the tokenizer has no chat template (and not raw), or drops question or answer.
            ConfigError: a system message that the template ignores or refuses, or given with raw.
        """
        self._model = target.model
        self._tokenizer = target.tokenizer
        self._raw = raw
        if raw and system is not None:
            raise ConfigError("a system message needs the chat template: leave out either raw or system.")
        if not raw:
            check_template(target.tokenizer, system=system)
        self.stop_ids = end_of_sequence_ids(target)
        sampling = {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature > 0 else {}
        self._generation = GenerationConfig(
            max_new_tokens=max_new_tokens,
            do_sample=temperature > 0,
            eos_token_id=sorted(self.stop_ids) or None,
            pad_token_id=self._padding_id(),
            use_cache=True,
            **sampling,
        )

    @property
    def context_length(self) -> int | None:
        """Positions the target was made for, or None if its configuration does not say."""
        length = getattr(text_config(self._model), "max_position_embeddings", None)
        return int(length) if length is not None else None

    def identity(self) -> dict[str, str]:
        """What answers depend on besides the options: {"dtype", "weights", "template"} (the last two hashed)."""
        template = "" if self._raw else str(self._tokenizer.chat_template)
        return {
            "dtype": str(self._model.dtype).removeprefix("torch."),
            "weights": weights_fingerprint(self._model),
            "template": hashlib.sha256(template.encode()).hexdigest()[:16],
        }

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation that ends with a user turn, ready for the answer.

        Raises:
            DataError: the template refuses the conversation, or (raw) it has more than one message.
        """
        if self._raw:
            if len(messages) != 1:
                raise DataError("raw mode takes one plain text per row, not a conversation; leave out raw.")
            return _token_ids(self._tokenizer, messages[0]["content"], special=True)
        text = render(self._tokenizer, messages, answer_follows=True)
        return _token_ids(self._tokenizer, text, special=False)

    def text(self, answer_ids: Sequence[int]) -> str:
        """An answer as text, special tokens left out: what a later turn of the conversation shows."""
        text = self._tokenizer.decode(list(answer_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def answer(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Answer a batch: per prompt the new ids, the stop token included where it was reached.

        Raises:
            ConfigError: the GPU has no room for the batch.
        """
        width = max(map(len, prompts))
        padding = self._generation.pad_token_id
        input_ids = torch.tensor([[padding] * (width - len(ids)) + list(ids) for ids in prompts])  # [N, width]
        mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts])  # [N, width]
        device = self._model.device
        try:
            with torch.inference_mode(), _own_generation_config(self._model):
                generate = cast(Callable[..., torch.Tensor], self._model.generate)
                output = generate(
                    input_ids=input_ids.to(device),
                    attention_mask=mask.to(device),
                    generation_config=self._generation,
                )  # [N, width + longest answer]
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"a batch of {len(prompts)} prompts of up to {width} tokens does not fit into {device}'s memory. "
                "Use a smaller batch_size in a new output folder."
            ) from error
        return [cut_at_stop(row, self.stop_ids) for row in output[:, width:].tolist()]

    @contextmanager
    def seeded(self, seed: int, shard: int) -> Iterator[None]:
        """Draw from the random stream of (seed, shard) inside; the caller's stream is untouched."""
        digest = hashlib.blake2b(f"{seed}/{shard}".encode(), digest_size=8).digest()
        device = self._model.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(int.from_bytes(digest, "little") >> 1)
            yield

    def _padding_id(self) -> int:
        """Any valid id does: padding is masked and cut off again."""
        own = self._tokenizer.pad_token_id
        return own if isinstance(own, int) else min(self.stop_ids, default=0)


def cut_at_stop(ids: Sequence[int], stops: frozenset[int]) -> list[int]:
    """`ids` through the first stop id; all of them if there is none."""
    end = next((index + 1 for index, token in enumerate(ids) if token in stops), len(ids))
    return list(ids[:end])


def render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], *, answer_follows: bool) -> str:
    """A conversation through the chat template.

    Raises:
        DataError: the template refuses it (roles that do not alternate, no system role, ...).
    """
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, add_generation_prompt=answer_follows
        )
    except TemplateError as error:
        roles = ", ".join(message["role"] for message in messages)
        raise DataError(f"the target's chat template refuses the roles {roles} ({error}); change the row.") from error
    assert isinstance(text, str)
    return text


def check_template(tokenizer: PreTrainedTokenizerBase, *, system: str | None = None) -> None:
    """Refuse a chat template under which nothing could be learned.

    Raises:
        ModelError: no template; one that drops the question; one that yields no answer tokens.
        ConfigError: `system` is given and the template ignores or refuses system messages.
    """
    if not tokenizer.chat_template:
        raise ModelError(
            "the target's tokenizer has no chat template. Use an instruction-tuned target, or raw mode "
            "(--raw) to let a base model continue each prompt as plain text."
        )
    question = {"role": "user", "content": _PROBE_QUESTION}
    answered = [question, {"role": "assistant", "content": _PROBE_ANSWER}]
    if _PROBE_QUESTION not in render(tokenizer, [question], answer_follows=True):
        raise ModelError("the target's chat template drops the user's message; mend the template in its tokenizer.")
    if _PROBE_ANSWER not in render(tokenizer, answered, answer_follows=False):
        raise ModelError(
            "the target's chat template yields no answer tokens (the assistant's message does not appear in the "
            "rendered conversation): the answer mask would be empty. Mend the template in the target's tokenizer."
        )
    if system is not None:
        try:
            shown = render(tokenizer, [{"role": "system", "content": _PROBE_SYSTEM}, question], answer_follows=True)
        except DataError as error:
            raise ConfigError(f"no system message can be used with this target: {error}") from error
        if _PROBE_SYSTEM not in shown:
            raise ConfigError("the target's chat template ignores system messages; leave out system.")


def weights_fingerprint(model: PreTrainedModel) -> str:
    """A short hash by which a resumed run recognises the same weights (names, shapes, some values of each)."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        values = parameter.detach().reshape(-1)[:_FINGERPRINT_VALUES].to(device="cpu", dtype=torch.float32)
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        digest.update(values.numpy().tobytes())
    return digest.hexdigest()[:16]


def _token_ids(tokenizer: PreTrainedTokenizerBase, text: str, *, special: bool) -> list[int]:
    return list(tokenizer(text, add_special_tokens=special)["input_ids"])


@contextmanager
def _own_generation_config(model: PreTrainedModel) -> Iterator[None]:
    """Set aside this model's generation defaults: `generate` would merge them into whatever we leave unset."""
    own = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own
