"""Rules of a class about its tensors under a config: required tensors, and the shape of each.

Sizes are expressions over ``config.json`` (`expressions`). `tools/build_shapes.py` records the rules from models that
it builds on the meta device: from one under the recorded config, and from others under configs in which one key or a
few differ. For a config with values that were not recorded, the rules return nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ckptx.architecture.configs import invalid_value_message
from ckptx.architecture.expressions import Scope, keys_of, try_evaluate
from ckptx.errors import InputError

Sizes = tuple[int | None, ...]  # shape of a tensor; None for an unknown size

_MAX_COUNT = 1 << 20  # maximum number of layers or experts


class Condition(NamedTuple):
    """A condition on a config under which the rules of some patterns are valid.

    Attributes:
        key: Dotted key of the config. If it is absent, the condition is met.
        kind: "is": the key has the value. "set": it is neither ``null`` nor 0. "among": it is ``null``, or a list of
            these strings only.
        values: For "is" the value alone, for "among" the strings; empty for "set".
    """

    key: str
    kind: str
    values: tuple[Any, ...]

    def is_met(self, config: Mapping[str, Any], aliases: Mapping[str, str] = {}, root: Sequence[str] = ()) -> bool:
        """Return True if the config fulfills the condition; an absent key has the default that was recorded."""
        found = _config_values(config, self.key, aliases, root)
        return self._accepts(found[0]) if found else True

    def _accepts(self, value: Any) -> bool:
        if self.kind == "set":
            return value not in (None, 0)
        if self.kind == "among":
            return value is None or (isinstance(value, list) and all(each in self.values for each in value))
        expected = self.values[0]
        return bool(value == (list(expected) if isinstance(expected, tuple) else expected))


class Switch(NamedTuple):
    """A key of the config that decides whether tensors of some patterns exist.

    Attributes:
        key: Dotted key of the config.
        effect: "adds": the patterns exist only if the key has another value than `value`, that of the recorded config,
            which is also the default for an absent key. "adds where given": the same, but the default is unknown. "may
            add": they exist with another value, and whether they do with `value` depends on other keys. "removes": they
            exist in the recorded config, and not if the key has `value`.
        value: The value, with tuples for lists.
        companions: Other dotted keys that had to be set together with `key` for the patterns to exist, and their
            values. The patterns exist only if all of them are set.
    """

    key: str
    effect: str
    value: Any
    companions: tuple[tuple[str, Any], ...] = ()

    def excludes(self, config: Mapping[str, Any], aliases: Mapping[str, str] = {}, root: Sequence[str] = ()) -> bool:
        """Return True if this key excludes the patterns: a model with this config surely has no tensor of them.

        Other switches of the same patterns may still add them.
        """
        values = [as_hashable(value) for value in _config_values(config, self.key, aliases, root)]
        if self.effect == "removes":
            return any(_is_same_value(value, self.value) for value in values)
        is_known = bool(values) or self.effect == "adds"
        if self.effect == "may add" or not is_known or any(self._companion_states(config, aliases, root)):
            return False
        return all(_is_same_value(value, self.value) for value in values)

    def is_opposite(self, config: Mapping[str, Any], aliases: Mapping[str, str] = {}, root: Sequence[str] = ()) -> bool:
        """Return True if `value` is a boolean, the config has the opposite one, and all `companions` are set."""
        values = _config_values(config, self.key, aliases, root)
        is_other = bool(values) and all(isinstance(value, bool) and value is not self.value for value in values)
        return is_other and all(self._companion_states(config, aliases, root))

    def _companion_states(
        self, config: Mapping[str, Any], aliases: Mapping[str, str], root: Sequence[str]
    ) -> Iterator[bool]:
        """Yield, for each key in `companions`, True if the config has the recorded value.

        For a number, any positive one counts, because its value affects sizes, not names.
        """
        for key, recorded in self.companions:
            values = [as_hashable(value) for value in _config_values(config, key, aliases, root)]
            if type(recorded) is int:
                yield any(type(value) is int and value > 0 for value in values)
            else:
                yield any(_is_same_value(value, recorded) for value in values)


def as_hashable(value: Any) -> Any:
    """Return the value with tuples for lists, so that it can be compared and hashed."""
    return tuple(map(as_hashable, value)) if isinstance(value, list | tuple) else value


def _is_same_value(a: Any, b: Any) -> bool:
    """Return True if both are equal and of the same kind, as a boolean and a number are not."""
    return isinstance(a, bool) == isinstance(b, bool) and bool(a == b)


def _config_values(config: Mapping[str, Any], key: str, aliases: Mapping[str, str], root: Sequence[str]) -> list[Any]:
    """Return the values of a dotted key and its alias in the config; empty if both are absent.

    As in `Scope.value`, the keys of an absent sub-config are read at the level above it.
    """
    *path, last = key.split(".")
    node: Mapping[str, Any] = config
    for part in (*root, *path):
        nested = node.get(part)
        node = nested if isinstance(nested, Mapping) else node
    return [node[name] for name in dict.fromkeys((last, aliases.get(key, last))) if name in node]


class ExpectedShapes(NamedTuple):
    """Tensors of a model under one config.

    Attributes:
        shapes: Pattern of model names -> possible shapes of its tensors; patterns of unknown shape are absent.
        counts: Path of a list of modules, which is the part of a pattern before a `*` -> number of modules in it.
        required: Patterns of required tensors: one must exist for every combination of indices below `counts`.
        stated_paths: Paths in `counts`, without `*`, whose number follows from keys of the config; the numbers of the
            others are constants of the class, or of lists inside other lists.
        absent_patterns: Pattern of the class that a model with this config does not have -> keys because of which it is
            absent, separated by commas.
        added_patterns: Pattern that a model with the recorded config lacks, and one with this config has because of a
            boolean key -> that key.
    """

    shapes: Mapping[str, tuple[Sizes, ...]]
    counts: Mapping[str, int]
    required: frozenset[str]
    stated_paths: frozenset[str]
    absent_patterns: Mapping[str, str] = {}
    added_patterns: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class ShapeRules:
    """The rules of one class.

    Attributes:
        shapes: Pattern of model names -> possible shapes of its tensors, with an expression for each size; empty if
            unknown.
        counts: Path before a `*` -> number of indices, as an expression.
        required: Patterns that exist under every config that meets their conditions, for each index of each `*`.
        conditions: Condition -> patterns whose rules are valid only if it is met.
        models: Config key of an exchangeable sub-model -> model type with which the rules were recorded.
        defaults: Defaults as in `Scope`; used only for keys of sub-configs that the config has.
        aliases: Aliases as in `Scope`.
        switches: Switch -> patterns that it adds or removes.
        other_patterns: Patterns of the recorded config that are in neither `shapes` nor `required`.
    """

    shapes: Mapping[str, tuple[tuple[str, ...], ...]]
    counts: Mapping[str, str] = field(default_factory=dict)
    required: frozenset[str] = frozenset()
    conditions: Mapping[Condition, frozenset[str]] = field(default_factory=dict)
    models: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, int | None] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    switches: Mapping[Switch, frozenset[str]] = field(default_factory=dict)
    other_patterns: frozenset[str] = frozenset()

    def evaluate(
        self, config: Mapping[str, Any], root: tuple[str, ...] = (), all_patterns: frozenset[str] = frozenset()
    ) -> ExpectedShapes | None:
        """Return the tensors of a model under the contents of ``config.json``.

        Args:
            config: Contents of ``config.json``.
            root: Keys to follow first, see `Scope`.
            all_patterns: Patterns of all tensors that the class has under any config.

        Returns:
            The tensors. None if the config has a sub-model of another type than the recorded one, or has none of the
            numbers that the rules read, as a config that was written by hand and only names the class.

        Raises:
            InputError: A value is a string or a fraction, or a number of modules is negative or above 2**20.
        """
        for key, model_type in self.models.items():
            nested = config.get(key)
            if isinstance(nested, Mapping) and nested.get("model_type") not in (None, model_type):
                return None
        defaults = {
            key: value for key, value in self.defaults.items() if _has_sub_config(config, key.rpartition(".")[0])
        }
        scope = Scope(config, defaults, self.aliases, root)
        if not self._has_number(scope):
            return None
        unrecorded_patterns = {
            pattern
            for condition, patterns in self.conditions.items()
            if not condition.is_met(config, self.aliases, root)
            for pattern in patterns
        }
        counts = {
            path: found for path, text in self.counts.items() if (found := _evaluate_count(text, scope)) is not None
        }
        shapes = {
            pattern: tuple(tuple(_evaluate_size(text, scope) for text in shape) for shape in alternatives)
            for pattern, alternatives in self.shapes.items()
            if pattern not in unrecorded_patterns
        }
        # size 0: the config disables the tensor
        shapes = {
            pattern: alternatives
            for pattern, alternatives in shapes.items()
            if all(0 not in shape for shape in alternatives)
        }
        absent = {pattern for pattern in self.shapes if pattern not in shapes}
        required = frozenset(
            each
            for each in self.required - absent - unrecorded_patterns
            if all(path in counts for path in star_prefixes(each))
        )
        stated_paths = frozenset(path for path in counts if "*" not in path and keys_of(self.counts[path]))
        return ExpectedShapes(
            shapes,
            counts,
            required,
            stated_paths,
            self._absent_patterns(config, root, all_patterns),
            self._added_patterns(config, root),
        )

    def _added_patterns(self, config: Mapping[str, Any], root: tuple[str, ...]) -> dict[str, str]:
        """Return the patterns that a boolean of this config adds to the recorded ones, with its key.

        As in `_absent_patterns`, every other key that matters must have its recorded value.
        """
        unrecorded_keys = {each.key for each in self.conditions if not each.is_met(config, self.aliases, root)}
        unrecorded_keys |= {
            each.key for each in self.switches if each.effect == "removes" and each.excludes(config, self.aliases, root)
        }
        added: dict[str, str] = {}
        for switch, patterns in self.switches.items():
            is_boolean = switch.effect in ("adds", "adds where given") and isinstance(switch.value, bool)
            if is_boolean and not unrecorded_keys - {switch.key} and switch.is_opposite(config, self.aliases, root):
                added |= dict.fromkeys((each for each in patterns if each.endswith((".weight", ".bias"))), switch.key)
        return added

    def _absent_patterns(
        self, config: Mapping[str, Any], root: tuple[str, ...], all_patterns: frozenset[str]
    ) -> dict[str, str]:
        """Return the patterns that no tensor has under this config, with the keys because of which they are absent.

        If a key that affects names or shapes, other than the keys of the switches of a pattern, has a value that was
        not recorded, that pattern is not returned.
        """
        unrecorded_keys = {each.key for each in self.conditions if not each.is_met(config, self.aliases, root)}
        by_pattern: dict[str, list[Switch]] = {}
        for switch, patterns in self.switches.items():
            for pattern in patterns:
                by_pattern.setdefault(pattern, []).append(switch)
        absent = {}
        for pattern, switches in by_pattern.items():
            if unrecorded_keys - {each.key for each in switches}:
                continue
            exclusions = [each.excludes(config, self.aliases, root) for each in switches]
            is_present = switches[0].effect == "removes"  # in the recorded config
            if any(exclusions) if is_present else all(exclusions):
                keys = dict.fromkeys(each.key for each, is_out in zip(switches, exclusions, strict=True) if is_out)
                absent[pattern] = ", ".join(keys)
        is_as_recorded = not unrecorded_keys and all(
            each.excludes(config, self.aliases, root)
            for each in self.switches
            if each.effect in ("adds", "adds where given")
        )
        if self.models and is_as_recorded:  # patterns of sub-models of other types than that of the config
            recorded = self.shapes.keys() | self.required | self.other_patterns
            model_type_keys = ", ".join(f"{key}.model_type" for key in self.models)
            absent |= dict.fromkeys(all_patterns - recorded - by_pattern.keys(), model_type_keys)
        return absent

    def _has_number(self, scope: Scope) -> bool:
        """Return True if the config itself, without defaults, has one of the numbers that the rules read."""
        bare = scope._replace(defaults={})
        texts = {text for shapes in self.shapes.values() for shape in shapes for text in shape if text}
        keys = {key for text in texts | set(self.counts.values()) for key in keys_of(text)}
        return any(bare.value(key) is not None for key in keys)


def _has_sub_config(config: Mapping[str, Any], path: str) -> bool:
    """Return True if the config has the sub-config at a dotted path.

    Only such a sub-config has defaults for absent keys. A key that is absent at the root was removed by hand, because
    transformers writes every key there, so False is returned for the root.
    """
    if not path:
        return False
    node: Any = config
    for key in path.split("."):
        node = node.get(key) if isinstance(node, Mapping) else None
    return isinstance(node, Mapping)


def star_prefixes(pattern: str) -> list[str]:
    """Return the part of a pattern before each component `*`, without the dot.

    Example:
        layers.*.experts.*.weight -> layers, layers.*.experts
    """
    parts = pattern.split(".")
    return [".".join(parts[:index]) for index, part in enumerate(parts) if part == "*"]


def _evaluate_count(text: str, scope: Scope) -> int | None:
    """Return the number of modules in a list; None if the config has no number for it.

    Raises:
        InputError: It is negative or above `_MAX_COUNT`.
    """
    found = try_evaluate(text, scope)
    if found is not None and not 0 <= found <= _MAX_COUNT:
        keys = sorted(keys_of(text))
        raise InputError(
            invalid_value_message(keys[0].split("."), scope.value(keys[0]), f"between 0 and {_MAX_COUNT:,}")
        )
    return found


def _evaluate_size(text: str, scope: Scope) -> int | None:
    return try_evaluate(text, scope) if text else None
