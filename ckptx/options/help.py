"""Help of options as a command shows it: section, text, and the options that each one depends on.

    verify --tp-plan    section "Layout"; requires --run and --tp 2 or more
    verify --workers    section "Execution"; not with --run

The command line, docs/options.md and the docstrings of the Python functions print these texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ckptx.options.option import Options, Setting, settings_of
from ckptx.options.sizes import GPU_GIB, parse_gpu_memory, parse_size


class OptionsSwitch(NamedTuple):
    """An option that chooses between two subclasses of `Options` for a command, such as `--run` of `verify`.

    Attributes:
        setting: The setting of the option in `options_with`.
        options_with: Options of the command if the option is given.
        options_without: Options of the command if it is not.
    """

    setting: Setting
    options_with: type[Options]
    options_without: type[Options]


class OptionHelp(NamedTuple):
    """Help of an option in one command.

    Attributes:
        section: Heading of its section.
        text: Help text, without dependencies.
        requires: Options that must be given with it, such as "--tp 2 or more".
        condition: Dependency on the switch of the command, "with --run" or "without --run"; "" for none.
        is_switch: True for the switch itself.
    """

    section: str
    text: str
    requires: Sequence[str] = ()
    condition: str = ""
    is_switch: bool = False

    def full_text(self, *, with_condition: bool = True) -> str:
        """Return the text with its dependencies.

        Args:
            with_condition: False leaves out the condition, for a section whose heading shows it.
        """
        flags, exclusion = list(self.requires), ""
        if with_condition and self.condition:
            preposition, _, flag = self.condition.rpartition(" ")
            if preposition == "with":
                flags.insert(0, flag)
            else:
                exclusion = f" Not with {flag}."
        required = f" Requires {' and '.join(flags)}." if flags else ""
        return f"{self.text}{exclusion}{required}"


def make_help(option_classes: Sequence[type[Options]]) -> dict[str, OptionHelp]:
    """Return the help of every option of a command, by the names of the fields."""
    switch = find_switch(option_classes)
    help_by_name: dict[str, OptionHelp] = {}
    for options in option_classes:
        for name, setting in settings_of(options).items():
            if setting.option is None or name in help_by_name:
                continue
            if switch is not None and name == switch.setting.name:
                help_by_name[name] = _option_help(switch.options_with, switch.setting, is_switch=True)
                continue
            condition = ""
            if (
                switch is not None
                and options is switch.options_without
                and name not in settings_of(switch.options_with)
            ):
                condition = f"without {switch.setting.flag}"
            elif switch is not None and options is switch.options_with:
                condition = f"with {switch.setting.flag}"
            help_by_name[name] = _option_help(options, setting, condition)
    return help_by_name


def _option_help(
    options: type[Options], setting: Setting, condition: str = "", *, is_switch: bool = False
) -> OptionHelp:
    """Return the help of an option with the section and the requirements that it has in these options."""
    assert setting.option is not None
    section = options.headings.get(setting.option.section, setting.option.section)
    requires = [text for _, text in options.requirements_of(setting.name)]
    return OptionHelp(section, setting.option.help, requires, condition, is_switch)


def find_switch(option_classes: Sequence[type[Options]]) -> OptionsSwitch | None:
    """Return the option that chooses between two of these subclasses of `Options`; None if no option does."""
    for options in option_classes:
        for name, setting in settings_of(options).items():
            if setting.is_switch:
                other = next(each for each in option_classes if each is not options and name in settings_of(each))
                return OptionsSwitch(setting, options, other)
    return None


def section_titles(entries: Sequence[OptionHelp]) -> dict[str, str]:
    """Return section -> its heading, with the condition in parentheses if all its options have the same one."""
    conditions: dict[str, set[str]] = {}
    for each in entries:
        if not each.is_switch:
            conditions.setdefault(each.section, set()).add(each.condition)
    return {
        section: f"{section} ({section_conditions.pop()})"
        if len(section_conditions) == 1 and "" not in section_conditions
        else section
        for section, section_conditions in conditions.items()
    }


def size_note(option_classes: Sequence[type[Options]]) -> str:
    """Return the units of sizes in the options of a command; "" if no option takes a size."""
    settings = [setting for options in option_classes for setting in settings_of(options).values()]
    parsers = {each.option.parse for each in settings if each.option is not None and each.option.is_size}
    sentences = []
    if parse_size in parsers:
        sentences.append(
            "SIZE is a number of bytes, or a number with a unit: 5GB is 5 x 1000^3 bytes, 5GiB is 5 x 1024^3 bytes."
        )
    if parse_gpu_memory in parsers:
        subject = "Only --gpu-memory" if sentences else "--gpu-memory"
        sentences.append(
            f"{subject} counts GB as GiB, as GPU vendors do: 80GB is 80 GiB (--gpu h100 stands for "
            f"its usable {GPU_GIB['h100']} GiB). It rejects 80 without a unit."
        )
    return " ".join(sentences)
