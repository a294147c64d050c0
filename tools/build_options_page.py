"""Write the tables of docs/options.md, one for each command, from the option classes in `ckptx.options`.

Run it as `python tools/build_options_page.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # run from a checkout, installed or not

from ckptx.options.commands import COMMANDS, Command, tables_of
from ckptx.options.help import make_help
from ckptx.options.option import SECTIONS, Argument, Option, Setting, settings_of
from ckptx.options.output import GlobalOptions

PATH = Path(__file__).parent.parent / "docs" / "options.md"
_BEGIN, _END = "<!-- the tables of tools/build_options_page.py -->\n", "<!-- end of the tables -->\n"
_HEAD = "| option | default | meaning |\n|---|---|---|\n"


def options_of(command: Command) -> list[tuple[Setting, Option]]:
    """Return the options of a command, without the global ones, in the order of the sections of the help."""
    found: dict[str, tuple[Setting, Option]] = {}
    for table in tables_of(command):
        for setting in settings_of(table).values():
            if setting.option is not None and not setting.option.is_hidden and table is not GlobalOptions:
                found.setdefault(setting.name, (setting, setting.option))
    return sorted(found.values(), key=lambda each: SECTIONS.index(each[1].section))


def arguments_of(command: Command) -> dict[str, str]:
    """Return the help of the positional arguments of a command by placeholder, such as `SRC`."""
    annotations = [each.annotation for table in command.option_tables for each in settings_of(table).values()]
    return {each.metavar: each.help for each in annotations if isinstance(each, Argument) and each.metavar}


def row(setting: Setting, option: Option, help_text: str) -> str:
    """Return a row of a table.

    Args:
        setting: The setting that the option sets: flags, type and default.
        option: The annotation of the setting.
        help_text: Help of the option.
    """
    flags = ", ".join(f"`{flag}`" for flag in (*setting.flags, *((option.off_flag,) if option.off_flag else ())))
    value = "" if setting.metavar is None else f" `{setting.metavar}`".replace("|", "\\|")
    default = setting.default_text if setting.kind is not bool else f"`{setting.default_text}`" * setting.default
    notes = [f"`{flag}` is short for `{value}`." for flag, value in option.shorthands.items()]
    return f"| {flags}{value} | {default} | {' '.join([help_text, *notes])} |\n"


def tables() -> str:
    """Return a heading and a table for each command."""
    found = []
    for words, command in COMMANDS.items():
        alias_note = f"\n\nAlso called `{words.split()[0]} {command.aliases[0]}`." if command.aliases else ""
        texts, arguments = make_help(tables_of(command)), arguments_of(command)
        rows = [f"| `{metavar}` |  | {text} |\n" for metavar, text in arguments.items()]
        rows += [row(setting, option, texts[setting.name].full_text()) for setting, option in options_of(command)]
        call = " ".join(["ckptx", words, *arguments])
        found.append(f"### {words}\n\n`{call}`: {command.summary}.{alias_note}\n\n{_HEAD}{''.join(rows)}\n")
    global_rows = [
        row(each, each.option, each.option.help)
        for each in settings_of(GlobalOptions).values()
        if each.option is not None
    ]
    return "".join([*found, f"### Every command\n\n{_HEAD}{''.join(global_rows)}\n"])


def page(text: str) -> str:
    """Return the text of the page with the current tables."""
    before, after = text.index(_BEGIN) + len(_BEGIN), text.index(_END)
    return f"{text[:before]}\n{tables()}{text[after:]}"


if __name__ == "__main__":
    PATH.write_text(page(PATH.read_text(encoding="utf-8")), encoding="utf-8")
