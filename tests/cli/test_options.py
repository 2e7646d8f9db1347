"""Option groups: they must reach the engine whole, and say at once when a value is wrong."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

from dflash.cli.options import ChainOptions, SamplingOptions, parse_logit_bias, with_options
from dflash.errors import ConfigError
from dflash.types import Drafting, SamplingParams
from tests.cli.fakes import CommandLine

# Every sampling option with a value that is not its default.
SAMPLING_WORDS = (
    "--max-new-tokens 9 --temperature 0.7 --top-k 5 --top-p 0.9 --min-p 0.1 --repetition-penalty 1.2 "
    "--presence-penalty 0.3 --frequency-penalty 0.2 --logit-bias 5=-inf --logit-bias 7=2.5 --seed 11 "
    "--stop END --stop --- --stop-token-id 3 --ignore-eos"
).split()


def test_every_sampling_parameter_is_an_option_and_arrives(cli: CommandLine) -> None:
    """Guards against options that are accepted and ignored (a field added to SamplingParams, or a wrong mapping)."""
    assert cli.run("generate", "hi", *SAMPLING_WORDS).code == 0
    expected = SamplingParams(
        max_new_tokens=9,
        temperature=0.7,
        top_k=5,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        logit_bias={5: float("-inf"), 7: 2.5},
        seed=11,
        stop_token_ids=(3,),
        stop=("END", "---"),
        ignore_eos=True,
    )
    assert cli.engine.calls[0]["params"] == expected
    plain = SamplingParams()
    for parameter in dataclasses.fields(SamplingParams):
        assert getattr(expected, parameter.name) != getattr(plain, parameter.name), parameter.name


def test_defaults_are_those_of_the_library(cli: CommandLine) -> None:
    """Guards against two sets of defaults that drift apart."""
    assert SamplingOptions().params() == SamplingParams()
    cli.run("generate", "hi")
    assert cli.engine.calls[0]["params"] == SamplingParams()


def test_model_options_reach_load(cli: CommandLine) -> None:
    """Guards against a model option that never gets to the engine."""
    words = "--target T --draft D --dtype bfloat16 --device cpu --threads 3 --width 3 --no-exact --trust-remote-code"
    assert cli.run("generate", "hi", *words.split()).code == 0
    (load,) = cli.loads
    assert callable(load.pop("progress"))
    assert load == {
        "target": "T",
        "draft": "D",
        "dtype": "bfloat16",
        "device": "cpu",
        "num_threads": 3,
        "exact": False,
        "trust_remote_code": True,
        "width": 3,
        "drafting": Drafting(width=3),
    }


def test_no_draft_loads_none(cli: CommandLine) -> None:
    """Guards against loading a draft (or failing for want of one) when plain decoding was asked for."""
    cli.run("generate", "hi", "--no-draft")
    assert cli.loads[0]["draft"] is None


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--width", "3", "--no-draft"], "--no-draft"),
        (["--width", "4", "--no-draft", "--draft", "D"], "--no-draft"),
    ],
)
@pytest.mark.parametrize("verb", ["generate", "chat"])
def test_a_width_without_effect_is_refused(cli: CommandLine, verb: str, words: list[str], part: str) -> None:
    """Guards against measuring widths that are all the same one, for want of a block (beyond one:
    tests/cli/test_real_models.py)."""
    outcome = cli.run(verb, *(["hi"] if verb == "generate" else []), *words)
    assert outcome.code == 2
    assert outcome.err.startswith("dflash: error: --width")
    assert part in outcome.err
    assert outcome.err.count("\n") == 1
    assert not cli.engine.calls


@pytest.mark.parametrize("width", ["1", "4"])
def test_a_width_within_the_block_is_taken(cli: CommandLine, width: str) -> None:
    """Guards against a command line that has a limit of its own beside that of `dflash.load`."""
    assert cli.run("generate", "hi", "--width", width).code == 0
    assert cli.run("demo", "--limit", "1", "--width", width).code == 0
    assert [load["width"] for load in cli.loads] == [int(width)] * 2


@pytest.mark.parametrize(
    ("words", "drafting"),
    [
        ("", Drafting()),
        ("--no-tree", Drafting(mode="exact")),
        ("--mode fast --no-copy", Drafting(mode="fast", copies=False)),
        ("--mode fast --no-draw", Drafting(mode="fast", draws=False)),
        ("--fixed --width 2", Drafting(fixed=True, width=2)),
        ("--draft-window 256", Drafting(draft_window=256)),
    ],
)
def test_drafting_options_reach_load(cli: CommandLine, words: str, drafting: Drafting) -> None:
    """Guards against a choice that never gets to the engine."""
    assert cli.run("generate", "hi", *words.split()).code == 0
    assert cli.loads[0]["drafting"] == drafting


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("--mode slow", "exact, auto, fast"),
        ("--mode fast --no-tree", "--no-tree"),
        ("--no-draw", "--no-draw"),
        ("--fixed --mode fast", "--fixed"),
        ("--fixed --no-copy", "--no-copy"),
    ],
)
def test_drafting_options_that_contradict_each_other(cli: CommandLine, words: str, part: str) -> None:
    """Guards against an option that is accepted and has no effect."""
    outcome = cli.run("generate", "hi", *words.split())
    assert outcome.code == 2
    assert part in outcome.err
    assert not cli.loads


def test_a_draft_that_is_named_and_not_used(cli: CommandLine) -> None:
    """Guards against silence about a --draft that --no-draft overrules; the comparison of both by adding one word to a
    command stays possible."""
    outcome = cli.run("generate", "hi", "--draft", "D", "--no-draft")
    assert (outcome.code, outcome.out) == (0, "Hello, world.\n")
    assert outcome.err == "dflash: note: --draft has no effect beside --no-draft.\n"
    assert cli.run("generate", "hi", "--no-draft").err == ""


@pytest.mark.parametrize("entry", ["5", "five=1", "5=much", "=1", ""])
def test_bad_logit_bias_is_named(entry: str) -> None:
    """Guards against a ValueError of int() or float() reaching the user."""
    with pytest.raises(ConfigError, match="ID=NUMBER"):
        parse_logit_bias([entry])


def test_with_options_spreads_a_group_and_puts_it_together_again() -> None:
    """Guards against lost options: the signature that Typer reads must hold each field of the group once."""
    seen: list[ChainOptions] = []

    @with_options
    def verb(*, model: ChainOptions, flag: bool = False) -> None:
        seen.append(model)

    names = list(inspect.signature(verb).parameters)
    assert names == [*(field.name for field in dataclasses.fields(ChainOptions)), "flag"]
    values = {name: parameter.default for name, parameter in inspect.signature(verb).parameters.items()}
    verb(**values | {"no_draft": True})
    assert seen == [ChainOptions(no_draft=True)]


def test_lists_of_two_runs_are_not_shared(cli: CommandLine) -> None:
    """Guards against a mutable default that collects the stop strings of earlier runs."""
    cli.run("generate", "hi", "--stop", "A")
    cli.run("generate", "hi", "--stop", "B")
    assert [call["params"].stop for call in cli.engine.calls] == [("A",), ("B",)]
