"""Options of `dflash bench`: servers, what is asked, how often, and where the record goes."""

from __future__ import annotations

import dataclasses
import functools
import os
from pathlib import Path
from typing import Annotated

from typer import Option

from dflash.bench.protocol import Sampling
from dflash.bench.record import LoadPart
from dflash.errors import ConfigError

server_option = functools.partial(Option, rich_help_panel="Servers (openai, vllm, sglang)")
question_option = functools.partial(Option, rich_help_panel="What is asked")
measuring_option = functools.partial(Option, rich_help_panel="How it is measured")
output_option = functools.partial(Option, rich_help_panel="Output")

DEFAULT_LIMIT = 8
DEFAULT_TOKENS = 32
DEFAULT_REPEATS = 2
"""Together with the built-in prompts: under two and a half minutes at 14 tokens/s, three forms measured."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Which servers, and how to talk to them."""

    url: Annotated[
        str | None, server_option("--url", metavar="URL", help="The server that speculates, as http://host:port.")
    ] = None
    plain_url: Annotated[
        str | None,
        server_option("--plain-url", metavar="URL", help="A server of the same target without a draft, to compare."),
    ] = None
    served_model: Annotated[
        str | None,
        server_option("--model", metavar="NAME", help="Model name in requests (default: the first one listed)."),
    ] = None
    api_key_env: Annotated[
        str | None,
        server_option("--api-key-env", metavar="VARIABLE", help="Environment variable that holds the server's key."),
    ] = None
    stream: Annotated[
        bool, server_option("--stream/--no-stream", help="Streaming tells the time to the first token.")
    ] = True
    tokenizer: Annotated[
        str | None,
        server_option("--tokenizer", metavar="MODEL", help="Counts tokens where a server does not (hub id or folder)."),
    ] = None
    timeout: Annotated[float, server_option("--timeout", metavar="SECONDS", help="Most seconds for one request.")] = (
        600.0
    )

    def api_key(self) -> str | None:
        """The key's value. Raises ConfigError if the variable is not set."""
        if self.api_key_env is None:
            return None
        if not (key := os.environ.get(self.api_key_env)):
            raise ConfigError(f"the environment variable {self.api_key_env} of --api-key-env is not set.")
        return key


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuestionOptions:
    """What is asked."""

    dataset: Annotated[
        list[str],
        question_option(
            "--dataset",
            metavar="NAME",
            help="built-in, gsm8k, math500, humaneval, mbpp, mt-bench or a .jsonl file. Repeatable.",
        ),
    ] = dataclasses.field(default_factory=list)
    data_dir: Annotated[
        Path | None,
        question_option("--data-dir", metavar="DIR", help="Folder with the sets as JSON lines, in place of the hub."),
    ] = None
    limit: Annotated[
        int | None,
        question_option("--limit", metavar="N", help=f"Prompts of each set (default: {DEFAULT_LIMIT})."),
    ] = None
    full: Annotated[bool, question_option("--full", help="Every prompt of each set.")] = False
    max_new_tokens: Annotated[
        int, question_option("--max-new-tokens", "-n", metavar="N", help="Most tokens per answer.")
    ] = DEFAULT_TOKENS
    temperature: Annotated[float, question_option("--temperature", metavar="X", help="0 = greedy.")] = 0.0
    top_p: Annotated[
        float, question_option("--top-p", metavar="X", help="Keep the most probable tokens up to this mass; 1 = off.")
    ] = 1.0
    top_k: Annotated[int, question_option("--top-k", metavar="N", help="Keep the N most probable tokens; 0 = off.")] = 0
    seed: Annotated[int, question_option("--seed", metavar="N", help="Of all random draws.")] = 0
    ignore_eos: Annotated[
        bool, question_option("--ignore-eos", help="Go on after the target's end tokens: answers of equal length.")
    ] = False
    thinking: Annotated[
        bool | None,
        question_option(
            "--thinking/--no-thinking", help="Sets enable_thinking of the chat template (default: its own).",
            show_default=False,
        ),
    ] = None  # fmt: skip

    def sampling(self) -> Sampling:
        """The part that goes into every request."""
        return Sampling(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
            ignore_eos=self.ignore_eos,
            thinking=self.thinking,
        )

    def prompts_per_set(self) -> int | None:
        """None = all. Raises ConfigError for a contradiction."""
        if self.full and self.limit is not None:
            raise ConfigError("--full and --limit contradict one another; leave one of them out.")
        return None if self.full else DEFAULT_LIMIT if self.limit is None else self.limit


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuringOptions:
    """How it is measured."""

    form: Annotated[
        list[str],
        measuring_option(
            "--form", metavar="NAME", help="Measure these forms of the backend only (docs/benchmark.md). Repeatable."
        ),
    ] = dataclasses.field(default_factory=list)
    repeats: Annotated[
        int, measuring_option("--repeats", metavar="N", help="Times that everything is asked in every form.")
    ] = DEFAULT_REPEATS
    concurrency: Annotated[
        str,
        measuring_option(
            "--concurrency", metavar="N,N,...", help="Requests at once; each number is measured by itself (servers)."
        ),
    ] = "1"
    rate: Annotated[
        float | None,
        measuring_option("--rate", metavar="X", help="Start X requests per second instead, evenly spaced (servers)."),
    ] = None
    warm_up: Annotated[
        int, measuring_option("--warm-up", metavar="N", help="Tokens of a first answer that is thrown away; 0 = none.")
    ] = 16

    def loads(self) -> tuple[LoadPart, ...]:
        """One per number. Raises ConfigError for what is no list of numbers."""
        if self.rate is not None:
            if self.concurrency != "1":
                raise ConfigError("--rate and --concurrency contradict one another; leave one of them out.")
            return (LoadPart(concurrency=None, rate=self.rate),)
        try:
            return tuple(LoadPart(concurrency=int(part)) for part in self.concurrency.split(","))
        except ValueError:
            raise ConfigError(f"--concurrency takes numbers such as 1,4,16, not {self.concurrency!r}.") from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordOptions:
    """Where the record goes."""

    out: Annotated[
        Path | None,
        output_option("--out", metavar="DIR", help="Folder of the record and report (default: runs/bench/<time>)."),
    ] = None
    resume: Annotated[
        Path | None,
        output_option("--resume", metavar="DIR", help="Go on with a run that was stopped, given the same options."),
    ] = None
    as_json: Annotated[bool, output_option("--json", help="Print the record as one line instead of tables.")] = False
