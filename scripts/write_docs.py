"""Writes docs/cli.md from the commands and the table of docs/training.md from the recipe's fields.

So neither page can name an option that does not exist. Run by `make format`; a test compares the pages with what
this script would write.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from dflash.cli.main import COMMANDS, load_command
from dflash.train.config import TrainConfig

DOCS = Path(__file__).parent.parent / "docs"
CLI_PAGE = DOCS / "cli.md"
TRAINING_PAGE = DOCS / "training.md"
KEYS_BEGIN = "<!-- keys: written by scripts/write_docs.py from src/dflash/train/config.py -->\n"
KEYS_END = "<!-- end of keys -->"
INTRODUCTION = """\
# Command line

<!-- Written by scripts/write_docs.py (`make format`): change the commands, not this page. -->

`dflash VERB --help` shows the same on the terminal. Texts and records go to standard output; figures, progress and
errors to standard error. Exit codes: 0 done; 1 `check` found something that speaks against the pair, `audit` a fault;
2 something that you can mend, said in one line, usage included; 3 `bench` had requests that failed; 130 stopped by
Ctrl-C. Where standard error is no terminal, work of more than ten seconds writes a plain line now and then.
Converted models are kept in `$DFLASH_CACHE`, else `$XDG_CACHE_HOME/dflash`, else `~/.cache/dflash`.
"""


def render_cli() -> str:
    """The whole page of the command line."""
    return "\n".join([INTRODUCTION, *(_verb(name) for name in COMMANDS)])


def _verb(name: str) -> str:
    command = load_command(name)
    arguments = [param for param in command.params if param.param_type_name == "argument"]
    options = [param for param in command.params if param.param_type_name == "option" and param.help]
    usage = " ".join(["dflash", name, "[OPTIONS]", *map(_placeholder, arguments)])
    lines = [f"## `dflash {name}`", "", inspect.cleandoc(command.help or ""), "", f"```\n{usage}\n```", ""]
    if arguments:
        lines += ["| argument | meaning |", "|---|---|"]
        lines += [f"| `{_placeholder(param)}` | {_cell(param.help)} |" for param in arguments] + [""]
    for panel in dict.fromkeys(param.rich_help_panel for param in options):
        lines += [f"| {panel or 'Options'} | default | meaning |", "|---|---|---|"]
        lines += [_option(param) for param in options if param.rich_help_panel == panel] + [""]
    return "\n".join(lines)


def _placeholder(param: Any) -> str:
    name = (param.metavar or param.name).upper()
    name = f"{name}..." if param.nargs == -1 else name
    return name if param.required else f"[{name}]"


def _option(param: Any) -> str:
    spellings = ", ".join(f"`{text}`" for text in _spellings(param))
    return f"| {spellings} | {_default(param)} | {_cell(param.help)} |"


def _spellings(param: Any) -> Iterator[str]:
    value = "" if param.is_flag else f" {param.metavar}"
    longest = max(param.opts, key=len)
    for text in param.opts:
        yield f"{text}{value}" if text == longest else text
    yield from param.secondary_opts


def _default(param: Any) -> str:
    if param.required:
        return "required"
    if param.is_flag and param.secondary_opts:
        return f"`{(param.opts if param.default else param.secondary_opts)[0]}`"
    if param.is_flag or param.default is None or param.default == []:
        return ""
    return f"`{param.default}`"


def _cell(text: str | None) -> str:
    return (text or "").replace("|", "\\|")


def render_training(page: str) -> str:
    """`page` with the table between its two marks written anew."""
    before, _, rest = page.partition(KEYS_BEGIN)
    _, _, after = rest.partition(KEYS_END)
    rows = [f"| `{key}` | {_key_default(field)} | {_cell(field.description)} |" for key, field in _keys(TrainConfig)]
    table = "\n".join(["", "| key | default | meaning |", "|---|---|---|", *rows, ""])
    return f"{before}{KEYS_BEGIN}{table}\n{KEYS_END}{after}"


def _keys(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _keys(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, field


def _key_default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required"
    return "" if field.default is None else f"`{field.default}`"


def main() -> None:
    """Write both pages."""
    CLI_PAGE.write_text(render_cli(), encoding="utf-8")
    TRAINING_PAGE.write_text(render_training(TRAINING_PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {CLI_PAGE} and {TRAINING_PAGE}", file=sys.stderr)


if __name__ == "__main__":
    main()
