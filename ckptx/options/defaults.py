"""Defaults of options on the command line, from files in the working directory and from the environment.

    command line  >  CKPTX_WORKERS=8  >  ckptx.toml  >  pyproject.toml  >  built-in default

    workers = 8                   # every command that has the option
    [convert]                     # every command of `convert`; in pyproject.toml [tool.ckptx.convert]
    max-memory = "1GB"
    [verify]
    reference-memory = "8GB"      # ignored in a call without --run

A key is the name of a flag, with dashes or underscores. The Python functions do not use these defaults.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ckptx.errors import CkptxError, InputError, UnsupportedError, UsageError
from ckptx.options.commands import COMMANDS, GROUPS, Command, commands_by_name, tables_of, unknown_option_error
from ckptx.options.option import Options, Setting, settings_of

_CONFIG_FILE, _PROJECT_FILE, _PROJECT_TABLE = "ckptx.toml", "pyproject.toml", "tool.ckptx"
_PROJECT_KEY = re.compile(rb"ckptx[\"']?\s*[.=\]]")  # `[tool.ckptx]`, `ckptx = {...}`; not a dependency "ckptx>=0.1"
_VARIABLE_PREFIX = "CKPTX_"
_MAX_FILE_BYTES = 1 << 20
# Variables that ckptx, its tests and its action use themselves.
OWN_VARIABLES = frozenset({"CKPTX_DEBUG", "CKPTX_SELECTIVE_AC_TRACE", "CKPTX_LAUNCHED", "CKPTX_COMPLETE"})
_BOOLEANS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


class Default(NamedTuple):
    """A default of one option.

    Attributes:
        setting: Option.
        value: Value for the field of the table.
        origin: File and key, or environment variable.
        precedence: Index of the source, then of the scope in it; a default with a higher one takes precedence.
    """

    setting: Setting
    value: Any
    origin: str
    precedence: tuple[int, int]


class _DefaultEntry(NamedTuple):
    """A key of a file, or an environment variable.

    Attributes:
        scope: Name of a command or a group; empty for every command.
        name: Name of the option, with underscores.
        value: Value in the file or the variable, not checked yet.
        origin: File and key, or environment variable.
    """

    scope: str
    name: str
    value: Any
    origin: str


def read_defaults(command_name: str) -> dict[str, Default]:
    """Return the defaults of a command by the names of the fields.

    Raises:
        UsageError: A file or an environment variable has an unknown key or a value that is not allowed.
        UnsupportedError: The value of a path is a URL.
    """
    command = commands_by_name()[command_name]
    group, defaults = command_name.rpartition(" ")[0], {}
    for source_index, entries in enumerate(_read_sources()):
        for scope_index, scopes in enumerate((("",), (group,) if group else (), _names_of(command_name, command))):
            for entry in entries:
                setting = _find_setting(command, entry.name) if entry.scope in scopes else None
                if setting is not None:
                    value = _checked_value(command, setting, entry)
                    defaults[setting.name] = Default(setting, value, entry.origin, (source_index, scope_index))
    return defaults


def applicable_defaults(command_name: str, arguments: Mapping[str, Any]) -> dict[str, Default]:
    """Return the defaults that apply to a call.

    A default is ignored if its option is given, if the table that the call selects does not have its option, if an
    option that it requires is not set, or if an option that it cannot be combined with is set on the command line, or
    by a default that takes precedence.

    Args:
        command_name: Name of the command.
        arguments: Options of the call by name.

    Raises:
        UsageError: A file or an environment variable has an unknown key or a value that is not allowed, or two defaults
            of one source cannot be combined.
        UnsupportedError: The value of a path is a URL.
    """
    applicable = {name: each for name, each in read_defaults(command_name).items() if name not in arguments}
    command = commands_by_name()[command_name]
    table = command.option_tables[0]
    for switch in (name for name, each in settings_of(command.option_tables[-1]).items() if each.is_switch):
        if arguments.get(switch) or (switch in applicable and applicable[switch].value):
            table = command.option_tables[-1]
    output_options = {
        name for each in tables_of(command) if each not in command.option_tables for name in settings_of(each)
    }
    applicable = {
        name: each for name, each in applicable.items() if name in output_options or name in settings_of(table)
    }
    _remove_excluded(applicable, table, arguments)
    while True:
        values = {**{name: each.value for name, each in applicable.items()}, **arguments}
        inapplicable = [name for name in applicable if name not in output_options and table.conflict(name, values)]
        if not inapplicable:
            return applicable
        for name in inapplicable:
            del applicable[name]


def _remove_excluded(applicable: dict[str, Default], table: type[Options], arguments: Mapping[str, Any]) -> None:
    """Remove each default that cannot be combined with an option of a source that takes precedence.

    Args:
        applicable: Defaults by name.
        table: Table of the call.
        arguments: Options of the call by name; they take precedence over all defaults.

    Raises:
        UsageError: Two defaults of one source cannot be combined.
    """
    settings = settings_of(table)
    pairs = [
        (name, other)
        for name, setting in settings.items()
        if setting.option is not None
        for other in setting.option.excludes
        if other in settings
    ]
    for name, other in [*pairs, *((other, name) for name, other in pairs)]:
        default, rival = applicable.get(name), applicable.get(other)
        if default is None or not default.setting.is_set(default.value):
            continue
        if other in arguments:
            if settings[other].is_set(arguments[other]):
                del applicable[name]
        elif rival is not None and rival.setting.is_set(rival.value):
            if rival.precedence == default.precedence:
                raise UsageError(
                    f"{default.origin}: {default.setting.flag} cannot be combined with {rival.setting.flag} "
                    f"({rival.origin}); leave out one of them"
                )
            if rival.precedence > default.precedence:
                del applicable[name]


def all_defaults() -> Iterator[tuple[Default, list[str]]]:
    """Iterate over the defaults from files and the environment, each with the names of the commands that use it.

    Raises:
        UsageError: A file or an environment variable has an unknown key or a value that is not allowed.
        UnsupportedError: The value of a path is a URL.
    """
    defaults: dict[tuple[str, str], tuple[Default, list[str]]] = {}
    for command_name in COMMANDS:
        for default in read_defaults(command_name).values():
            defaults.setdefault((default.setting.flag, default.origin), (default, []))[1].append(command_name)
    yield from defaults.values()


class UnknownVariable(NamedTuple):
    """An environment variable `CKPTX_*` that is not an option of any command.

    Attributes:
        name: Name of the variable.
        suggestion: A variable with a similar name; "" for none.
    """

    name: str
    suggestion: str

    def note(self) -> str:
        """Return a note for the user."""
        hint = f"; did you mean {self.suggestion}?" if self.suggestion else "; unset it"
        return f"{self.name} is not an option{hint}"


def unknown_variables() -> list[UnknownVariable]:
    """Return the environment variables with the prefix of ckptx that have no effect."""
    names = {name for name in os.environ if name.startswith(_VARIABLE_PREFIX)} - OWN_VARIABLES
    if not names:
        return []
    settings = [
        setting
        for command in COMMANDS.values()
        for table in tables_of(command)
        for setting in settings_of(table).values()
        if setting.option is not None
    ]
    known = {f"{_VARIABLE_PREFIX}{name.upper()}" for setting in settings for name in setting.names}
    unknown = sorted(names - known)
    if not unknown:
        return []
    from difflib import get_close_matches  # slow to import

    # The last argument is the ratio of difflib, 0 to 1, from which a variable is suggested.
    candidates = [*sorted(known), *sorted(OWN_VARIABLES)]
    return [UnknownVariable(name, "".join(get_close_matches(name, candidates, 1, 0.8))) for name in unknown]


def _read_sources() -> Iterator[list[_DefaultEntry]]:
    """Yield the entries of each source of defaults: pyproject.toml, ckptx.toml, environment variables.

    A later source takes precedence over an earlier one.
    """
    project_table = _read_table(_PROJECT_FILE, _PROJECT_TABLE)
    yield list(_entries_of(project_table, f"{_PROJECT_FILE}: {_PROJECT_TABLE}.")) if project_table else []
    config_table = _read_table(_CONFIG_FILE, "")
    yield list(_entries_of(config_table, f"{_CONFIG_FILE}: ")) if config_table else []
    yield [
        _DefaultEntry("", name.removeprefix(_VARIABLE_PREFIX).lower(), value, name)
        for name, value in os.environ.items()
        if name.startswith(_VARIABLE_PREFIX) and value
    ]


def _read_table(file: str, table: str) -> Mapping[str, Any] | None:
    """Return a table of a TOML file in the working directory; None if the file or the table does not exist.

    Args:
        file: Name of the file.
        table: Name of the table, with dots; "" for the whole file.

    Raises:
        UsageError: The file cannot be read, is not valid TOML, or has a value in place of the table.
    """
    if not os.path.lexists(file):
        return None
    from ckptx.storage.files import read_small

    try:
        data = read_small(Path(file), _MAX_FILE_BYTES)
    except (InputError, UnsupportedError, OSError) as error:
        if table:  # a pyproject.toml that cannot be read need not have a table for ckptx
            return None
        raise UsageError(str(error)) from error
    if table and _PROJECT_KEY.search(data) is None:
        return None
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        content: Any = tomllib.loads(data.decode("utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"{file}: is not valid TOML: {error}; correct it") from error
    for key in table.split(".") if table else ():
        content = content.get(key, {}) if isinstance(content, dict) else {}
    if not isinstance(content, dict):
        raise UsageError(f"{file}: {table} must be a table")
    return content


def _entries_of(table: Mapping[str, Any], origin: str, scope: str = "") -> Iterator[_DefaultEntry]:
    """Yield the keys of a table of a file and of the tables for commands in it.

    Args:
        table: Parsed table.
        origin: File and path of the table, to which a key is appended for messages, such as "ckptx.toml: convert.".
        scope: Name of the command or group whose table it is; "" for the table that applies to every command.

    Raises:
        UsageError: An option or a command does not exist.
    """
    for key, value in table.items():
        if not isinstance(value, dict):
            name = key.replace("-", "_")
            commands = [
                each for command_name, each in commands_by_name().items() if _is_in_scope(scope, command_name, each)
            ]
            if not any(_find_setting(each, name) for each in commands):
                tables = [each for command in commands for each in tables_of(command)]
                raise UsageError(f"{origin}{key}: {unknown_option_error(scope or 'ckptx', tables, name)}")
            yield _DefaultEntry(scope, name, value, origin + key)
            continue
        inner_scope = f"{scope} {key}".strip()
        scopes = {*commands_by_name(), *GROUPS}
        if inner_scope not in scopes:
            from difflib import get_close_matches  # slow to import

            matches = get_close_matches(inner_scope, scopes, 1)
            raise UsageError(f"{origin}{key}: unknown command" + (f"; did you mean {matches[0]}?" if matches else ""))
        yield from _entries_of(value, f"{origin}{key}.", inner_scope)


def _is_in_scope(scope: str, command_name: str, command: Command) -> bool:
    """Return True if a key applies to a command: its scope is empty, the command, its group or an alias."""
    return not scope or scope in (command_name.rpartition(" ")[0], *_names_of(command_name, command))


def _names_of(command_name: str, command: Command) -> tuple[str, ...]:
    """Return the name and the aliases of a command, each with the name of its group.

    Args:
        command_name: Name or alias of the command.
        command: The command.
    """
    group = command_name.rpartition(" ")[0]
    return next(
        (name, *(f"{group} {alias}".strip() for alias in command.aliases))
        for name, each in COMMANDS.items()
        if each is command
    )


def _settings_named(command: Command, name: str) -> list[Setting]:
    """Return the options of a command with this name, from each of its tables."""
    settings = []
    for table in tables_of(command):
        for setting in settings_of(table).values():
            if setting.option is not None and name in setting.names:
                settings.append(setting)
    return settings


def _find_setting(command: Command, name: str) -> Setting | None:
    """Return the first option of a command with this name; None if there is none."""
    return next(iter(_settings_named(command, name)), None)


def _checked_value(command: Command, setting: Setting, entry: _DefaultEntry) -> Any:
    """Return the value of an entry, checked by the tables of a command.

    Raises:
        UsageError: No table allows the value; ArgumentTypeError if its type is wrong.
        UnsupportedError: The value is a URL, and a path is required.
    """
    value = _parse_variable(setting, entry) if entry.origin.startswith(_VARIABLE_PREFIX) else entry.value
    last_error: CkptxError | None = None
    for each in _settings_named(command, entry.name):
        try:
            return each.check_value(value, entry.origin)
        except CkptxError as error:
            last_error = error
    assert last_error is not None
    raise last_error


def _parse_variable(setting: Setting, entry: _DefaultEntry) -> Any:
    """Return the value of an environment variable in the type of the option."""
    text = entry.value
    try:
        if setting.kind is bool:
            return _BOOLEANS[text.strip().lower()]
        if setting.kind is tuple:
            return text.split()
        if setting.kind is int and setting.option is not None and not setting.option.is_size:
            return int(text)
    except (KeyError, ValueError):
        pass  # `check_value` rejects the string
    return text


def display_value(default: Default) -> str:
    """Return the value of a default for printing; secrets are hidden."""
    if default.setting.is_secret:
        return "(hidden)"
    value = default.value
    if isinstance(value, bool):
        return str(value).lower()
    return " ".join(value) if isinstance(value, tuple) else str(value)
