"""Fields of tables of options, which are annotated with `Option`, `Argument` or `Hook`.

    Annotated[type, Option(...)]     an option of the command line and of the Python function
    Annotated[type, Argument(...)]   a positional argument of both
    Annotated[type, Hook(...)]       a parameter of the Python function only: a callback, a log

The type determines the rest: a `Literal` has choices, an `int` a range, a `bool` is a flag, a `Sequence` may be
repeated, `str | float` is a number, and `str | Path` is a path, which must not be a URL.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeGuard, TypeVar, Union, get_args, get_origin

from ckptx.errors import ArgumentTypeError, UsageError
from ckptx.untrusted.remote_name import refuse_remote
from ckptx.wording import counted

if TYPE_CHECKING:  # in typing since Python 3.11
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_: bool):
        return lambda cls: cls


# Headings of the sections of a help page.
OUTPUT_CHECKPOINT, LAYOUT, COMPARISON, MODEL_RUN = "Output checkpoint", "Layout", "Comparison", "Model run"
TRAINING_STEP, RECIPE, LAYOUT_SEARCH, MEMORY_LIMITS = "Training step", "Recipe", "Layout search", "Memory limits"
SOURCE, BOTH_CHECKPOINTS = "Source", "Both checkpoints"
EXECUTION, REPORT, GLOBAL = "Execution", "Report", "Global options"
SECTIONS = (
    LAYOUT,
    OUTPUT_CHECKPOINT,
    COMPARISON,
    MODEL_RUN,
    TRAINING_STEP,
    RECIPE,
    LAYOUT_SEARCH,
    MEMORY_LIMITS,
    SOURCE,
    BOTH_CHECKPOINTS,
    EXECUTION,
    REPORT,
    GLOBAL,
)

T = TypeVar("T", bound="Options")


class Requirement(NamedTuple):
    """An option that must be set if another one is.

    Attributes:
        field: Name of its field.
        min_value: Minimum of its value; 0 for any value.
    """

    field: str
    min_value: int = 0


class Option(NamedTuple):
    """An option.

    Attributes:
        help: Help text: a noun phrase or a sentence.
        section: Heading on the help page.
        flags: Flags; empty means `--` and the name of the field.
        aliases: Former flags, which still work; help does not show them.
        off_flag: Flag that turns a boolean option off, such as "--no-backward"; "" if it is off by default.
        metavar: Placeholder of the value; None derives it from the type.
        default: Description of the default; None shows the default of the field.
        minimum, maximum: Range of an integer; None means unbounded.
        parse: Function that converts a size such as `5GB` or `256MiB` to bytes; None if the value is not a size. Its
            second argument is the subject of its error messages.
        is_secret: True for a value that is never printed.
        is_hidden: True to leave the option out of help and docs/options.md, such as one with a single valid value.
        keywords: Strings with a special meaning among free strings, such as "auto"; for shell completion.
        spellings: Other spelling of a choice -> choice.
        shorthands: Flag without a value -> choice.
        requires: Fields that must be set if this one is, in every command.
        excludes: Fields that must not be set if this one is; a table need not have them.
        replaces: Names of this option in other tools or commands, with underscores, such as "num_workers"; the error
            message for an option of such a name suggests this one.
    """

    help: str
    section: str
    flags: Sequence[str] = ()
    aliases: Sequence[str] = ()
    off_flag: str = ""
    metavar: str | None = None
    default: str | None = None
    minimum: int | None = None
    maximum: int | None = None
    parse: Callable[[str | int, str], int] | None = None
    is_secret: bool = False
    is_hidden: bool = False
    keywords: Sequence[str] = ()
    spellings: Mapping[str, str] = {}
    shorthands: Mapping[str, str] = {}
    requires: Sequence[Requirement] = ()
    excludes: Sequence[str] = ()
    replaces: Sequence[str] = ()

    @property
    def is_size(self) -> bool:
        """Return True for a number of bytes."""
        return self.parse is not None


class Argument(NamedTuple):
    """A positional argument.

    Attributes:
        help: Help text of the argument.
        metavar: Placeholder in the usage line; "" for an argument that the name of the command sets.
        is_optional: True if the command line may omit it, although the Python function requires it.
        advice: Next step in the error message for a missing argument; "" for none.
    """

    help: str
    metavar: str = ""
    is_optional: bool = False
    advice: str = ""


class Hook(NamedTuple):
    """A parameter of the Python function that the command line does not have.

    Attributes:
        help: Help text of the parameter.
    """

    help: str


class Setting(NamedTuple):
    """A field of a table, with what its type and annotation determine.

    Attributes:
        name: Name of the field and of the keyword argument.
        type: Type without `Annotated`.
        kind: Class of the value: bool, int, str, or tuple for a sequence; for `int | str` and `str | Path` the first of
            the two. For a hook its class, object for a function.
        choices: Values that are allowed, other spellings included; empty if any value is.
        default: Default of the field; MISSING for a required argument.
        annotation: The `Option`, `Argument` or `Hook`.
    """

    name: str
    type: Any
    kind: type
    choices: tuple[Any, ...]
    default: Any
    annotation: Option | Argument | Hook

    @property
    def option(self) -> Option | None:
        """Return the annotation of an option; None for arguments and hooks."""
        return self.annotation if isinstance(self.annotation, Option) else None

    @property
    def is_switch(self) -> bool:
        """Return True for a flag that turns a command into another, as --run does with verify.

        Each of the two has its own subclass of `Options`; in that with the flag, True is its only choice.
        """
        return self.choices == (True,)

    @property
    def flags(self) -> Sequence[str]:
        """Return the flags of an option, without `aliases` and `off_flag`."""
        option = self.option
        return (option.flags if option is not None else ()) or (f"--{self.name.replace('_', '-')}",)

    @property
    def flag(self) -> str:
        """Return the flag that error messages name: the first one with two dashes."""
        return next((flag for flag in self.flags if flag.startswith("--")), self.flags[0])

    @property
    def aliases(self) -> Sequence[str]:
        """Return the former flags of an option, which help does not show."""
        return self.option.aliases if self.option is not None else ()

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names in Python and in files of defaults: that of the field, then the flags with underscores."""
        flags = (flag.lstrip("-").replace("-", "_") for flag in (*self.flags, *self.aliases))
        return tuple(dict.fromkeys((self.name, *flags)))

    @property
    def main_choices(self) -> tuple[str, ...]:
        """Return the choices without other spellings, as strings."""
        spellings = self.option.spellings if self.option is not None else {}
        return tuple(str(each) for each in self.choices if each not in spellings)

    @property
    def default_text(self) -> str:
        """Return the description of the default; empty for a flag that is off, an argument and a hook."""
        option = self.option
        if option is None or option.default is not None:
            return "" if option is None or option.default is None else option.default
        if self.kind is bool:
            return self.flag if self.default else ""
        return str(self.default)

    @property
    def metavar(self) -> str | None:
        """Return the placeholder of the value in help; None for a flag."""
        option = self.option
        if option is None or self.kind is bool:
            return None
        if option.metavar is not None:
            return option.metavar
        if self.choices:
            return "|".join(self.main_choices)
        if option.is_size:
            return "SIZE"
        return "N" if self.kind is int else "TEXT"

    @property
    def is_path(self) -> bool:
        """Return True if the value is a path or, for an argument, a Hub id; a URL is refused."""
        return Path in _union_members(self.type)

    @property
    def is_secret(self) -> bool:
        """Return True if the value is never printed."""
        return self.option is not None and self.option.is_secret

    @property
    def is_required(self) -> bool:
        """Return True if the setting has no default."""
        return self.default is MISSING

    def is_set(self, value: Any) -> bool:
        """Return True if a value is neither None nor the default."""
        return value is not None and value != self.default

    def check_value(self, value: Any, subject: str | None = None) -> Any:
        """Return a checked value: other spellings of a choice are replaced, a sequence becomes a tuple.

        A size is checked and returned as it is, such as "5GB".

        Args:
            value: Value from the caller, the command line or a file.
            subject: Subject of the error message; None means the flag, or for a wrong type the argument.

        Raises:
            ArgumentTypeError: The value has the wrong type.
            UsageError: The value is not among the choices, is out of range, or is not a size.
            UnsupportedError: The value is a URL, and a path is required.
        """
        accepted_types, description = self.accepted_types
        # bool is a subclass of int, but not accepted as an integer
        if not isinstance(value, accepted_types) or (type(value) is bool and bool not in accepted_types):
            raise ArgumentTypeError(f"{subject or self.name}: {_quoted(value)} must be {description}")
        if self.kind is tuple:
            return _check_strings(value, subject or self.name)
        subject = subject or self.flag
        if self.is_path:
            refuse_remote(value)
        option = self.option
        if option is None:
            return value
        if option.parse is not None:
            option.parse(value, subject)
            return value
        if self.kind is int:
            return _check_range(value, option, subject)
        if self.choices:
            value = option.spellings.get(value, value)
            if value not in self.choices:
                raise UsageError(f"{subject}: {_quoted(value)} must be one of {', '.join(self.main_choices)}")
        return value

    @property
    def accepted_types(self) -> tuple[tuple[type, ...], str]:
        """Return the accepted types of a value, and their description for an error message, such as "an integer"."""
        if isinstance(self.annotation, Hook) and not self.is_path:
            classes = tuple(each for each in _union_members(self.type) if is_class(each) and each is not NoneType)
            return (classes, f"a {classes[0].__name__}") if classes else ((Callable,), "a function")
        if self.option is not None and self.option.parse is not None:
            return (int, str), "a size such as 5GB, or a number of bytes"
        if self.is_path:
            return (str, os.PathLike), "a path"
        if self.kind is tuple:
            return (Sequence,), "a list of strings"
        if self.kind is bool:
            return (bool,), "true or false"
        if float in _union_members(self.type):
            return (str, int, float), "a number"
        if self.kind is int:
            return (int,), "an integer"
        if self.choices:
            return (str,), f"one of {', '.join(self.main_choices)}"
        return (str,), "a string"


def _quoted(value: Any) -> str:
    return f'"{value:.80}"' if isinstance(value, str) else f"{value!r:.80}"


def _check_strings(value: Any, subject: str) -> tuple[str, ...]:
    """Return a sequence of strings as a tuple; raise an ArgumentTypeError for anything else, also a single string."""
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(each, str) for each in value):
        raise ArgumentTypeError(f"{subject}: {_quoted(value)} must be a list of strings")
    return tuple(value)


def _check_range(value: int, option: Option, subject: str) -> int:
    """Return the value; raise a UsageError if it is out of the range of the option."""
    minimum, maximum = option.minimum, option.maximum
    if (minimum is not None and value < minimum) or (maximum is not None and value > maximum):
        allowed = f"at least {minimum}" if maximum is None else f"between {minimum} and {maximum:,}"
        raise UsageError(f"{subject}: {value} must be {allowed}")
    return value


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Options:
    """Base class of the tables of options and of their mixins; the constructor checks the values.

    For type checkers a table is a frozen dataclass. At run time it is not, because generating the methods of some
    thirty dataclasses takes longer than a command takes to start.

    The constructor takes None for an option that is not set, which gets its default.

    Attributes:
        command: Name of the command, such as "convert to-dcp"; with the switch that selects the table, such as
            "verify --run".
        requirements: Option -> options that it requires in this command only; `Option.requires` applies to all.
        headings: Section -> its heading on the help page of this command, if it is another one.

    Raises:
        UsageError: A value is not allowed, or conflicts with another one.
        UnsupportedError: A path is a URL.
        ArgumentTypeError: A value has the wrong type, or an argument is missing.
        TypeError: A name is unknown.
    """

    command: ClassVar[str] = ""
    requirements: ClassVar[Mapping[str, Sequence[Requirement]]] = {}
    headings: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls, *, kw_only: bool = True) -> None:
        """Accept `kw_only=False` for a table with positional arguments; only type checkers read it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        settings = settings_of(type(self))
        kwargs = bind_arguments(type(self).__name__, settings, args, kwargs)
        unknown = kwargs.keys() - settings.keys()
        if unknown:
            raise TypeError(f"{type(self).__name__}() has no option {min(unknown)!r}")
        for name, setting in settings.items():
            value = kwargs.get(name)
            self.__dict__[name] = setting.default if value is None else setting.check_value(value)
        values = {setting.name: value for setting, value in self.values()}
        for name in values:
            conflict = self.conflict(name, values) if settings[name].option is not None else ""
            if conflict:
                raise UsageError(conflict)
        self.check()

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{type(self).__name__} cannot be changed; use `with_values`")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.__dict__ == other.__dict__

    __hash__ = None  # type: ignore[assignment]  # values may be lists

    def __repr__(self) -> str:
        shown = [f"{each.name}={'...' if each.is_secret else repr(value)}" for each, value in self.values()]
        return f"{type(self).__name__}({', '.join(shown)})"

    def with_values(self: T, **changes: Any) -> T:
        """Return the options with some values changed."""
        return type(self)(**{**self.__dict__, **changes})

    def check(self) -> None:
        """Check rules that annotations cannot express; tables with such rules override this method.

        Raises:
            UsageError: An option conflicts with another one.
        """

    def values(self) -> Iterator[tuple[Setting, Any]]:
        """Iterate over the options and arguments that are set, with their values."""
        for name, setting in settings_of(type(self)).items():
            value = getattr(self, name)
            if not isinstance(setting.annotation, Hook) and setting.is_set(value):
                yield setting, value

    def values_shared_with(self, table: type[Options]) -> dict[str, Any]:
        """Return the values of the options that are set here and that another table also has, by name."""
        other_settings = settings_of(table)
        return {
            setting.name: value for setting, value in self.values() if setting.name in other_settings and setting.option
        }

    @classmethod
    def conflict(cls, name: str, values: Mapping[str, Any]) -> str:
        """Return the error message if an option conflicts with the others, or lacks one that it requires; else "".

        Args:
            name: Option that is set.
            values: Options that are set, by name.
        """
        settings = settings_of(cls)
        option, flag = settings[name].option, settings[name].flag
        assert option is not None
        for (required, min_value), text in cls.requirements_of(name):
            value = values.get(required)
            if not settings[required].is_set(value) or (
                min_value and not (isinstance(value, int) and value >= min_value)
            ):
                return f"{flag} requires {text}"
        for other in option.excludes:
            if other in settings and settings[other].is_set(values.get(other)):
                return f"{flag} cannot be combined with {settings[other].flag}; leave out one of them"
        return ""

    @classmethod
    def requirements_of(cls, name: str) -> Iterator[tuple[Requirement, str]]:
        """Yield each requirement of an option in this command, and its text, such as "--tp 2 or more"."""
        settings = settings_of(cls)
        option = settings[name].option
        for each in (*(option.requires if option is not None else ()), *cls.requirements.get(name, ())):
            yield each, settings[each.field].flag + (f" {each.min_value} or more" if each.min_value else "")


def settings_of(table: type[Options]) -> Mapping[str, Setting]:
    """Return the fields of a table by name: arguments, then options and hooks, those of the last mixin first."""
    settings_by_name = _settings_by_table.get(table)
    if settings_by_name is None:
        hints: dict[str, Any] = {}
        for each in reversed(table.__mro__):
            hints |= inspect.get_annotations(each)
        settings = [_setting_of(table, name, hint) for name, hint in hints.items() if hasattr(hint, "__metadata__")]
        settings.sort(key=lambda each: not isinstance(each.annotation, Argument))
        settings_by_name = _settings_by_table[table] = {each.name: each for each in settings}
    return settings_by_name


_settings_by_table: dict[type[Options], dict[str, Setting]] = {}


def bind_arguments(
    name: str, settings: Mapping[str, Setting], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call by name.

    Args:
        name: Name of the function, for error messages.
        settings: Parameters of the function.
        args: Positional arguments.
        kwargs: Keyword arguments.

    Raises:
        ArgumentTypeError: There are too many or too few arguments, or two for one parameter.
    """
    positional = [each.name for each in settings.values() if isinstance(each.annotation, Argument)]
    if len(args) > len(positional):
        accepted = counted(len(positional), "positional argument")
        raise ArgumentTypeError(f"{name}() takes {accepted}, but {len(args)} were given")
    by_name = dict(zip(positional, args, strict=False))
    duplicates = [each for each in by_name if each in kwargs]
    missing = [each for each in settings if settings[each].is_required and each not in by_name and each not in kwargs]
    if duplicates or missing:
        problem = f"two values for {duplicates[0]!r}" if duplicates else f"no value for {missing[0]!r}"
        raise ArgumentTypeError(f"{name}() has {problem}")
    return {**by_name, **kwargs}


def _setting_of(table: type[Options], name: str, hint: Any) -> Setting:
    """Return the setting of a field from its `Annotated` type hint.

    Raises:
        TypeError: The type of an option is not one of those that options may have.
    """
    base, annotation = hint.__origin__, hint.__metadata__[0]
    types = [each for each in _union_members(base) if each is not NoneType]
    choices: tuple[Any, ...] = get_args(types[0]) if get_origin(types[0]) is Literal else ()
    kind: type = object
    if choices:
        kind = type(choices[0])
    elif get_origin(types[0]) is not None and issubclass(get_origin(types[0]), Sequence):
        kind = tuple
    elif is_class(types[0]):
        kind = types[0]
    if isinstance(annotation, Option) and kind not in (bool, int, str, tuple):
        raise TypeError(
            f"{table.__name__}.{name}: an option is a bool, int, str, str | float, str | Path, Literal or Sequence[str]"
        )
    return Setting(name, base, kind, choices, getattr(table, name, MISSING), annotation)


def is_class(hint: Any) -> TypeGuard[type]:
    """Return True if a type hint is a class; in Python 3.10, `list[str]` is an instance of `type`, too."""
    return isinstance(hint, type) and get_origin(hint) is None


def _union_members(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union, None included; a hint that is no union is its own member."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
