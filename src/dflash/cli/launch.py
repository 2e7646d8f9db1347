"""`dflash launch`: the command of a serving engine for a target and its draft, shown, run, watched and stopped."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from dflash.cli.errors import say
from dflash.cli.options import model_option, output_option, with_options
from dflash.cli.progress import working
from dflash.errors import ConfigError, EngineError
from dflash.registry import LAUNCHERS, load_attribute
from dflash.resolve import AUTO, Progress

if TYPE_CHECKING:
    from dflash.launch.drafts import ServedDraft
    from dflash.launch.plan import LaunchRequest, Plan

AUTOMATIC = "auto"


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What the engine is told of the pair."""

    platform: Annotated[
        str, model_option("--platform", metavar="NAME", help="nvidia, amd or cpu (auto = what this machine has).")
    ] = AUTOMATIC
    no_draft: Annotated[bool, model_option("--no-draft", help="Serve the target alone, to compare with.")] = False
    width: Annotated[
        int | None,
        model_option("--width", metavar="N", help="Most rows per verification, anchor included (default: the block)."),
    ] = None
    draft_attention_backend: Annotated[
        str | None,
        model_option(
            "--draft-attention-backend", metavar="NAME", help="In the engine's word (default: the documented one)."
        ),
    ] = None
    force: Annotated[
        bool, model_option("--force", help="Start although a check says that the engine refuses or misreads the draft.")
    ] = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessOptions:
    """Where the engine comes from and where it listens."""

    host: Annotated[str, typer.Option("--host", metavar="NAME", help="Address to listen on.")] = "127.0.0.1"
    port: Annotated[
        int | None, typer.Option("--port", metavar="N", help="Port to listen on (default: the engine's).")
    ] = None
    python: Annotated[
        str | None,
        typer.Option("--python", metavar="FILE", help="Interpreter of the environment that holds the engine."),
    ] = None
    ready_timeout: Annotated[
        float, typer.Option("--ready-timeout", metavar="SECONDS", help="Longest wait until it serves.")
    ] = 900.0
    log: Annotated[
        Path | None, typer.Option("--log", metavar="FILE", help="Write the engine's output there, not to the terminal.")
    ] = None


@with_options
def launch(
    engine: Annotated[str, typer.Argument(help=f"Serving engine: {' or '.join(LAUNCHERS)}.")],
    target: Annotated[str, typer.Argument(help="Hub id, local folder, GGUF file or built-in name.")],
    draft: Annotated[
        str, typer.Argument(help="Hub id, local folder or built-in name; auto = the one for this target.")
    ] = AUTO,
    flags: Annotated[
        list[str] | None,
        typer.Argument(help="After `--`: flags of the engine itself (parallelism, memory, ...), handed through."),
    ] = None,
    *,
    pair: EngineOptions,
    process: ProcessOptions,
    dry_run: Annotated[bool, output_option("--dry-run", help="Show the command and its variables; start nothing.")] = (
        False
    ),
    as_json: Annotated[bool, output_option("--json", help="With --dry-run: as one JSON record.")] = False,
) -> None:
    """Serve a target and its draft with vLLM or SGLang.

    Checks the draft against what the engine accepts, shows the exact command, runs it until Ctrl-C and leaves nothing
    running. Needs the engine in an environment of its own; many GPUs and hosts are the engine's own flags, after `--`.
    """
    if as_json and not dry_run:
        raise ConfigError("--json shows the command of --dry-run as a record; add --dry-run.")
    words = [] if flags is None else list(flags)
    if draft.startswith("-"):  # `launch vllm TARGET -- --flag`: what follows `--` is no draft
        draft, words = AUTO, [draft, *words]
    if engine not in LAUNCHERS:
        raise ConfigError(f"engine '{engine}' is unknown; use one of {', '.join(LAUNCHERS)}.")
    with working("resolving") as progress:
        request, problems = _request(target, draft, tuple(words), pair, process, progress)
        plan: Plan = load_attribute(LAUNCHERS[engine])(request)
    problems = [*plan.problems, *problems]
    if problems and not pair.force:
        raise EngineError(f"{engine} cannot serve this: {'; '.join(problems)} (or --force).")
    for problem in problems:
        say(f"warning: {problem}")
    for note in plan.notes:
        say(f"note: {note}")
    if dry_run:
        typer.echo(json.dumps(_record(plan)) if as_json else plan.shell())
        return
    _run(plan, process)


def _request(
    target: str,
    draft: str,
    flags: tuple[str, ...],
    pair: EngineOptions,
    process: ProcessOptions,
    progress: Progress,
) -> tuple[LaunchRequest, list[str]]:
    """What is asked of the engine, and why the two models do not belong together."""
    from dflash.launch.locate import pair_problems, served_draft, served_target
    from dflash.launch.plan import LaunchRequest

    found = served_target(target, progress=progress)
    theirs = None if pair.no_draft else served_draft(draft, found)
    _check_width(pair.width, theirs)
    request = LaunchRequest(
        target=found,
        draft=theirs,
        platform=_platform(pair.platform),
        host=process.host,
        port=process.port,
        width=pair.width,
        draft_backend=pair.draft_attention_backend,
        python=process.python,
        flags=flags,
        environment=dict(os.environ),
    )
    return request, [] if theirs is None else pair_problems(theirs, found)


def _run(plan: Plan, process: ProcessOptions) -> NoReturn:
    """Run the plan until it ends or we are told to stop; ends the process with the fitting exit code."""
    from dflash.launch.server import serving

    say(f"starting: {plan.shell()}")
    with _stopping_on_sigterm(), ExitStack() as loading:
        if process.log is not None:  # else the engine's own output is the sign of life
            loading.enter_context(working(f"{plan.engine} is loading"))
        with serving(
            plan, environment=dict(os.environ), log=process.log, ready_seconds=process.ready_timeout
        ) as server:
            loading.close()
            say(f"ready on {plan.url} (Ctrl-C stops it)")
            code = server.wait()
    raise EngineError(f"{plan.engine} ended by itself with exit code {code}; its own output says why.")


@contextmanager
def _stopping_on_sigterm() -> Iterator[None]:
    """Inside, SIGTERM ends this process the orderly way, so that the engine is stopped before."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _platform(name: str) -> str:
    from dflash.launch.plan import PLATFORMS

    if name == AUTOMATIC:
        return _this_machine()
    if name not in PLATFORMS:
        raise ConfigError(f"platform '{name}' is unknown; use one of {', '.join(PLATFORMS)}.")
    return name


def _this_machine(devices: Path = Path("/dev")) -> str:
    """By the drivers' device files; `devices` is replaced in tests."""
    if (devices / "nvidiactl").exists() or sys.platform == "win32":
        return "nvidia"
    return "amd" if (devices / "kfd").exists() else "cpu"


def _check_width(width: int | None, draft: ServedDraft | None) -> None:
    if width is None:
        return
    if draft is None:
        raise ConfigError("--width limits the rows of a draft's block, which --no-draft leaves out: drop one of them.")
    most = draft.num_proposals + 1
    if not 2 <= width <= most:
        raise ConfigError(f"--width {width} is outside 2 to {most}, the rows of this draft's block.")


def _record(plan: Plan) -> dict[str, Any]:
    return {
        "engine": plan.engine,
        "argv": list(plan.argv),
        "env": dict(plan.env),
        "url": plan.url,
        "notes": list(plan.notes),
    }
