"""Options that several verbs share, each written once: a frozen dataclass per group, a field per option.

A verb takes a whole group as one parameter and is decorated with `with_options`, which shows the group's
fields to Typer as if the verb had listed them itself. Defaults of sampling options are those of `SamplingParams`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

from typer import Argument, Option

from dflash.errors import ConfigError
from dflash.registry import BACKENDS, DRAFTS, MODEL_FREE_DRAFTERS, TARGETS
from dflash.resolve import AUTO
from dflash.types import MODES, Drafting, Mode, SamplingParams

model_option = functools.partial(Option, rich_help_panel="Model")
sampling_option = functools.partial(Option, rich_help_panel="Sampling")
output_option = functools.partial(Option, rich_help_panel="Output")

DEFAULT_TARGET = "smollm2-135m"
DEFAULT_BACKEND = "torch"
_PLAIN = SamplingParams()

TargetArgument = Annotated[
    str,
    Argument(metavar="TARGET", help=f"Hub id, local folder, GGUF file or built-in name ({', '.join(TARGETS)})."),
]
DraftArgument = Annotated[
    str,
    Argument(
        metavar="[DRAFT]",
        help=f"Hub id, local folder, GGUF file or built-in name ({', '.join(DRAFTS)}); auto = the one for this target.",
    ),
]
DtypeOption = Annotated[
    str | None,
    model_option(
        "--dtype",
        metavar="NAME",
        help="float32, bfloat16 or float16 (default: bfloat16 where the device has it, else float32).",
    ),
]
DeviceOption = Annotated[
    str | None,
    model_option(
        "--device",
        metavar="NAME",
        help="cpu, cuda, cuda:1, mps ...; balanced or sequential = the target spread over all NVIDIA GPUs (default: an "
        "NVIDIA GPU if there is one).",
    ),
]
ThreadsOption = Annotated[int | None, model_option("--threads", metavar="N", help="CPU threads (default: see README).")]
RemoteCodeOption = Annotated[
    bool, model_option("--trust-remote-code", help="Run Python code that comes with the model.")
]
BackendOption = Annotated[
    str, model_option("--backend", metavar="NAME", help=f"What computes: {' or '.join(BACKENDS)}.")
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which models run, and on what."""

    target: Annotated[
        str,
        model_option(
            "--target",
            "-t",
            metavar="MODEL",
            help=f"Hub id, local folder, GGUF file or built-in name ({', '.join(TARGETS)}).",
        ),
    ] = DEFAULT_TARGET
    draft: Annotated[
        str,
        model_option(
            "--draft",
            "-d",
            metavar="MODEL",
            help=f"Hub id, local folder, GGUF file or built-in name ({', '.join(DRAFTS)}); auto = the one for this "
            f"target, {', '.join(MODEL_FREE_DRAFTERS)} = copies of earlier text, without a model.",
        ),
    ] = AUTO
    dtype: DtypeOption = None
    device: DeviceOption = None
    threads: ThreadsOption = None
    width: Annotated[
        int | None,
        model_option(
            "--width",
            metavar="N",
            help="Most rows per forward of the target, anchor included (default: as many as pay, or the draft's block "
            "with --fixed).",
        ),
    ] = None
    mode: Annotated[
        str,
        model_option(
            "--mode",
            metavar="NAME",
            help="exact: chains and copies, bit-exact; fast: trees and drawn guesses, too; auto: trees where they "
            "bring 10 % more.",
        ),
    ] = "auto"
    no_tree: Annotated[bool, model_option("--no-tree", help="Never feed branches: --mode exact.")] = False
    draft_window: Annotated[
        int | None,
        model_option(
            "--draft-window",
            metavar="N",
            help="Newest tokens that the draft's layers with full attention see, for long texts. Default: all.",
        ),
    ] = None
    no_copy: Annotated[bool, model_option("--no-copy", help="Do not look for copies of earlier text.")] = False
    no_bigrams: Annotated[
        bool, model_option("--no-bigrams", help="Leave the counts of neighbouring tokens beside the draft alone.")
    ] = False
    no_draw: Annotated[
        bool,
        model_option("--no-draw", help="Mode fast: never draw guesses from the draft; a seed then keeps its text."),
    ] = False
    fixed: Annotated[
        bool,
        model_option("--fixed", help="Feed the draft's whole block every round; no copies, no decisions by cost."),
    ] = False
    trust_remote_code: RemoteCodeOption = False

    def drafting(self) -> Drafting:
        """How these options draft. Raises `ConfigError` for an unknown mode and for options that exclude each other."""
        modes: Mapping[str, Mode] = {mode: mode for mode in MODES}
        if self.mode not in modes:
            raise ConfigError(f"--mode is one of {', '.join(MODES)}, not {self.mode!r}.")
        if self.no_tree and self.mode == "fast":
            raise ConfigError("--mode fast feeds trees, which --no-tree forbids: drop one of them.")
        if self.fixed and (self.mode == "fast" or self.no_copy or self.no_bigrams):
            raise ConfigError("--fixed feeds whole blocks only: drop --mode fast, --no-copy and --no-bigrams.")
        if self.no_draw and self.mode != "fast":
            raise ConfigError("--no-draw limits what --mode fast may do, and nothing else draws: drop it.")
        mode: Mode = "exact" if self.no_tree else modes[self.mode]
        return Drafting(
            mode=mode,
            fixed=self.fixed,
            copies=not self.no_copy,
            bigrams=not self.no_bigrams,
            draws=not self.no_draw,
            width=self.width,
            draft_window=self.draft_window,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MachineOptions:
    """How models run, for verbs that take target and draft as arguments."""

    backend: BackendOption = DEFAULT_BACKEND
    dtype: DtypeOption = None
    device: DeviceOption = None
    threads: ThreadsOption = None
    trust_remote_code: RemoteCodeOption = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOptions(ModelOptions):
    """As above, for verbs that decode in this process."""

    backend: BackendOption = DEFAULT_BACKEND
    kv_bits: Annotated[
        int | None,
        model_option(
            "--kv-bits", metavar="N", help="Quantise keys and values to 4 or 8 bits (--backend mlx). Default: off."
        ),
    ] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChainOptions(EngineOptions):
    """As above, for verbs that can also decode without a draft or without bit-exactness."""

    no_draft: Annotated[bool, model_option("--no-draft", help="Plain decoding by the same engine.")] = False
    exact: Annotated[
        bool,
        model_option(
            "--exact/--no-exact", help="Same bits with and without a draft, at a few per cent of plain speed."
        ),
    ] = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Everything of `SamplingParams`, as options."""

    max_new_tokens: Annotated[
        int, sampling_option("--max-new-tokens", "-n", metavar="N", help="Most tokens to generate.")
    ] = _PLAIN.max_new_tokens
    temperature: Annotated[float, sampling_option("--temperature", metavar="X", help="0 = greedy.")] = (
        _PLAIN.temperature
    )
    top_k: Annotated[int, sampling_option("--top-k", metavar="N", help="Keep the N most probable tokens; 0 = off.")] = (
        _PLAIN.top_k
    )
    top_p: Annotated[
        float,
        sampling_option("--top-p", metavar="X", help="Keep the most probable tokens up to this mass; 1 = off."),
    ] = _PLAIN.top_p
    min_p: Annotated[
        float,
        sampling_option("--min-p", metavar="X", help="Drop tokens below this share of the best one; 0 = off."),
    ] = _PLAIN.min_p
    repetition_penalty: Annotated[
        float,
        sampling_option("--repetition-penalty", metavar="X", help="Against tokens of prompt and output; 1 = off."),
    ] = _PLAIN.repetition_penalty
    presence_penalty: Annotated[
        float,
        sampling_option("--presence-penalty", metavar="X", help="Once per token already in the output; 0 = off."),
    ] = _PLAIN.presence_penalty
    frequency_penalty: Annotated[
        float,
        sampling_option("--frequency-penalty", metavar="X", help="Per occurrence in the output; 0 = off."),
    ] = _PLAIN.frequency_penalty
    logit_bias: Annotated[
        list[str],
        sampling_option(
            "--logit-bias", metavar="ID=X", help="Add X to the logit of token ID; -inf bans it. Repeatable."
        ),
    ] = dataclasses.field(default_factory=list)
    seed: Annotated[
        int, sampling_option("--seed", metavar="N", help="Same seed, same text, with or without a draft.")
    ] = _PLAIN.seed
    stop: Annotated[list[str], sampling_option("--stop", metavar="TEXT", help="End before this text. Repeatable.")] = (
        dataclasses.field(default_factory=list)
    )
    stop_token_id: Annotated[
        list[int], sampling_option("--stop-token-id", metavar="ID", help="End after this token. Repeatable.")
    ] = dataclasses.field(default_factory=list)
    ignore_eos: Annotated[bool, sampling_option("--ignore-eos", help="Go on after the target's own end tokens.")] = (
        _PLAIN.ignore_eos
    )

    def params(self) -> SamplingParams:
        """The request these options describe. Raises `ConfigError` for values out of range."""
        return SamplingParams(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=parse_logit_bias(self.logit_bias),
            seed=self.seed,
            stop_token_ids=tuple(self.stop_token_id),
            stop=tuple(self.stop),
            ignore_eos=self.ignore_eos,
        )


def parse_logit_bias(entries: Sequence[str]) -> Mapping[int, float]:
    """["5=-inf", "7=2.5"] -> {5: -inf, 7: 2.5}. Raises `ConfigError` naming the entry."""
    bias: dict[int, float] = {}
    for entry in entries:
        token_id, _, number = entry.partition("=")
        try:
            bias[int(token_id)] = float(number)
        except ValueError:
            raise ConfigError(f"--logit-bias takes ID=NUMBER such as 5=-inf, not {entry!r}.") from None
    return bias


def with_options(verb: Callable[..., None]) -> Callable[..., None]:
    """A command whose options are the verb's own parameters and the fields of its option groups, in order."""
    signature = inspect.signature(verb, eval_str=True)
    groups: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        group: Any = parameter.annotation
        if dataclasses.is_dataclass(group):
            groups[parameter.name] = group
            parameters += _fields_as_parameters(group)
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(verb)
    def command(**values: Any) -> None:
        for name, kind in groups.items():
            values[name] = kind(**{field.name: values.pop(field.name) for field in dataclasses.fields(kind)})
        verb(**values)

    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return command


def _fields_as_parameters(group: Any) -> list[inspect.Parameter]:
    annotations = typing.get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default if field.default_factory is dataclasses.MISSING else field.default_factory(),
            annotation=annotations[field.name],
        )
        for field in dataclasses.fields(group)
    ]
