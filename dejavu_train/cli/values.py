"""Reads what a command line and its YAML files give for the fields of a dataclass, as one nested mapping."""

import copy
import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import get_loader

from dejavu_train.cli.flags import options
from dejavu_train.ground.errors import UserError

INSTALLED = Path(__file__).parents[1]  # its folder configs is that of the repository
_CLOCK = re.compile(r"\d+(:\d+)+")  # YAML 1.1 takes 10:00:00 for a number to the base of 60


class Fields:
    """The fields of a dataclass by their dotted names: ``sections`` and the ``types`` of all others.

    ``optional`` are sections that may be null. A dataclass's ``GONE`` names keys of earlier versions and what to give
    instead, its ``CONSTANTS`` such keys and the value that they always have.
    """

    def __init__(self, kind: type[Any]) -> None:
        self.kind = kind
        self.sections: dict[str, Any] = {}
        self.types: dict[str, Any] = {}
        self.mappings: dict[str, Any] = {}  # fields that may be mappings, with their defaults
        self._add(kind, "")
        hints = typing.get_type_hints(kind)
        self.constants: Mapping[str, Any] = getattr(kind, "CONSTANTS", {})
        self.optional = {name: part for name, part in self.sections.items() if hints.get(name, part) is not part}

    def _add(self, kind: type[Any], prefix: str) -> None:
        hints = typing.get_type_hints(kind)
        for field in dataclasses.fields(kind):
            name, hint = prefix + field.name, hints[field.name]
            parts = (hint, *typing.get_args(hint))
            section = next((part for part in parts if dataclasses.is_dataclass(part)), None)
            if section is not None:
                self.sections[name] = section
                self._add(section, f"{name}.")  # type: ignore[arg-type]
                continue
            self.types[name] = hint
            if any(typing.get_origin(part) is dict for part in parts):
                made = field.default_factory
                self.mappings[name] = field.default if made is dataclasses.MISSING else made()

    def meant(self, name: str) -> str:
        """Hint to say behind a name that is not known."""
        instead = getattr(self.kind, "GONE", {}).get(name.partition(".")[0])
        if instead is not None:
            return f", which is no longer there; {instead}"
        if f"{name}.source" in self.types:
            return f" without a value; write --{name} FILE"
        if name in self.sections:
            return f" with a value; its keys are options, such as --{next(k for k in self.types if k.startswith(name))}"
        known = name.rpartition(".")[2]
        close = [known] if known in self.types else difflib.get_close_matches(name, self.types, 1)
        return f"; did you mean {close[0]}?" if close else "; --help lists the known ones"

    def check_constant(self, name: str, value: Any) -> None:
        """Raise :class:`UserError` for a key that is no option any more, and another value than it always has."""
        if value != self.constants[name]:
            always = yaml.safe_dump(self.constants[name], default_flow_style=True).partition("\n")[0]
            raise UserError(f"{name} is no option any more, it is always {always}, got {value}; leave it out")

    def check_keys(self, values: dict[Any, Any], prefix: str, path: Path) -> None:
        """Raise :class:`UserError` for a key of a file that is unknown, or holds no keys and values where it must.

        Keys of constants are taken out.
        """
        for key, value in list(values.items()):
            name = f"{prefix}{key}"
            if name in self.constants:
                self.check_constant(name, values.pop(key))
                continue
            if name not in self.sections and name not in self.types:
                raise UserError(f"the config file {path} has the unknown key {name}{self.meant(name)}")
            kinds = (dict, type(None)) if name in self.optional else (dict,)
            if typing.get_origin(self.types.get(name)) not in (dict, None):  # text is left to jsonargparse
                kinds = (dict, *typing.get_args(self.types[name]))
            if (name in self.sections or name in self.mappings) and type(value) not in kinds and str not in kinds:
                raise UserError(f"the config file {path}: {name} must hold keys and values, got {value}")
            if name in self.sections and value is not None:
                self.check_keys(value, f"{name}.", path)


def read(fields: Fields, argv: Sequence[str]) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """The values of all files and flags, and what is given with ``--help`` and ``--print_config``.

    Raises:
        UserError: as :func:`dejavu_train.cli.parser.parse`.
    """
    values: dict[str, Any] = {}
    for name, default in fields.mappings.items():
        if default:
            _put(values, name.split("."), copy.deepcopy(default))
    typed: dict[str, Any] = {}
    lists: dict[str, list[str]] = {}
    rest: dict[str, list[str]] = {}
    for asked, given, words in options(argv):
        if any("\ud800" <= letter <= "\udfff" for letter in " ".join(words)):  # how Python hands over other bytes
            raise UserError(f"{ascii(words[-1])} is not UTF-8; neither texts nor paths of another encoding are taken")
        name = under if (under := asked.replace("-", "_")) in fields.types else asked
        name = f"{name}.source" if given and f"{name}.source" in fields.types else name  # --text FILE
        mapping = next((known for known in fields.mappings if f"{name}.".startswith(f"{known}.")), None)
        if name == "config":
            if not all(given) or not given:
                raise UserError("--config needs a value: a YAML file, such as configs/opt-mini.yaml")
            for path in given:
                values = merged(values, read_file(fields, Path(path)))
        elif name in ("help", "print_config"):
            rest[name] = given
        elif name in fields.optional and given in ([], ["null"]):
            typed[name] = None if given else {}
        elif mapping and given:
            _lay(typed, fields, mapping, name, given[-1])
        elif name in fields.constants and given:
            fields.check_constant(name, _load(name, given[-1]))
        elif name in fields.types:
            lists[name] = lists.get(name, []) + given
            _put(typed, name.split("."), _value(name, fields.types[name], lists[name]))
        else:
            raise UserError(f"unknown option --{name}{fields.meant(name)}")
    return merged(values, typed), rest


def _value(name: str, kind: Any, given: list[str]) -> Any:
    """Value that a flag gives for a field of this type."""
    item = item_of(kind)
    if item is not None:
        if len(given) == 1 and given[0].startswith("["):
            return _load(name, given[0])
        if typing.get_origin(kind) is tuple:  # else one or several: names of files may hold commas
            given = [part for one in given for part in one.split(",") if part]
        return [each if _is_text(item) else _load(name, each) for each in given]
    if given:
        return given[-1] if _is_text(kind) and given[-1] != "null" else _load(name, given[-1])
    if kind is not bool:
        raise UserError(f"--{name} needs a value: {described(kind)}")
    return True


def _lay(typed: dict[str, Any], fields: Fields, mapping: str, name: str, given: str) -> None:
    """Lay what a flag gives for a field that may be a mapping, or for a key of it, over what earlier flags gave."""
    value, keys = _load(mapping, given), mapping.split(".")
    if name != mapping:
        _put(typed, [*keys, *name.removeprefix(f"{mapping}.").split(".")], value)
    elif isinstance(value, dict):
        below: dict[str, Any] = {}
        _put(below, keys, value)
        typed.update(merged(typed, below))
    elif typing.get_origin(fields.types[mapping]) is dict:
        raise UserError(f"--{mapping} must hold keys and values, got {given}; write --{mapping}.KEY VALUE")
    else:
        _put(typed, keys, given if value is not None else None)


def read_file(fields: Fields, path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The values of a YAML file, laid over those of the file that it names as its ``base``.

    ``configs/NAME.yaml`` that is not there is the one that is installed with the package. above: files whose base this
    one is.
    """
    if path.parts[:1] == ("configs",) and not path.exists() and (INSTALLED / path).exists():
        path = INSTALLED / path
    if path.resolve() in above:
        raise UserError(f"the config file {path} is its own base, named by {above[-1]}; name another one there")
    try:
        text = path.read_text(encoding="utf-8")
        values, double = get_loader("yaml")(text) or {}, _double_key(yaml.compose(text, yaml.SafeLoader))
    except FileNotFoundError:
        raise UserError(f"there is no config file {path}; give a YAML file, such as configs/opt-mini.yaml") from None
    except (UnicodeDecodeError, yaml.YAMLError, IsADirectoryError) as error:
        raise UserError(f"the config file {path} is not readable YAML: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"the config file {path} must hold keys and values, got {values}")
    if double is not None:
        raise UserError(f"the config file {path} has {double} twice; write it once, with all that is below it")
    base = values.pop("base", None)
    if not isinstance(base, str | None) or base == "":
        raise UserError(f"the config file {path}: base must name another YAML file, got {base}")
    fields.check_keys(values, "", path)
    return values if base is None else merged(read_file(fields, path.parent / base, (*above, path.resolve())), values)


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """``above`` laid over ``below``: mappings are merged, unless the upper one names a class. Other values replace."""
    result = dict(below)
    for key, value in above.items():
        before = result.get(key)
        both = isinstance(value, dict) and isinstance(before, dict) and "class_path" not in value
        result[key] = merged(before, value) if both else value  # type: ignore[arg-type]
    return result


def item_of(kind: Any) -> Any:
    """The type of a list's items. None for other types. ``str | tuple[str, ...]`` is a list too."""
    tuples = (part for part in (kind, *typing.get_args(kind)) if typing.get_origin(part) is tuple)
    return next((typing.get_args(part)[0] for part in tuples), None)


def _is_text(kind: Any) -> bool:
    """Whether a field takes a word as it is typed: of several types the first decides, but for null."""
    if typing.get_origin(kind) is typing.Literal:
        return all(isinstance(value, str) for value in typing.get_args(kind))
    parts = typing.get_args(kind) if typing.get_origin(kind) in (types.UnionType, typing.Union) else ()
    return kind is str or bool(parts) and (parts[0] is str or all(p is type(None) or _is_text(p) for p in parts))


def described(kind: Any) -> str:
    """A type in words."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return f"one of {', '.join(map(str, parts))}" if len(parts) > 1 else str(parts[0])
    if origin in (types.UnionType, typing.Union):
        return " or ".join(described(part) for part in parts)
    if origin is tuple:
        return f"a list, each item {described(parts[0])}"
    if origin is dict:
        return "a mapping"
    return {int: "a whole number", float: "a number", bool: "true or false", type(None): "null"}.get(kind, "text")


def _double_key(node: yaml.Node | None, above: tuple[yaml.Node, ...] = ()) -> str | None:
    """A key that a mapping of a YAML file has twice, as ``a.b``. YAML's readers keep the last one and say nothing."""
    names: set[str] = set()
    if not isinstance(node, yaml.MappingNode) or node in above:  # an alias may name what it stands in
        return None
    for key, value in node.value:
        if isinstance(key, yaml.ScalarNode):
            if key.value in names:
                return str(key.value)
            names.add(key.value)
            below = _double_key(value, (*above, node))
            if below is not None:
                return f"{key.value}.{below}"
    return None


def _load(name: str, text: str) -> Any:
    """A value of a flag, read as YAML."""
    if _CLOCK.fullmatch(text):
        return text
    try:
        return get_loader("yaml")(text)
    except yaml.YAMLError:
        raise UserError(f"--{name}: {text} is not readable YAML; put it in quotes") from None


def _put(mapping: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    """Lay ``value`` into ``mapping`` under nested ``keys``. A name that stands there already is a class with arguments.

    >>> found = {"logger": "Some"}
    >>> _put(found, ["logger", "name"], "x")
    >>> found
    {'logger': {'class_path': 'Some', 'init_args': {'name': 'x'}}}
    """
    first, *inner = keys
    if not inner:
        mapping[first] = value
        return
    if isinstance(mapping.get(first), str):
        mapping[first] = {"class_path": mapping[first], "init_args": {}}
    below = mapping.setdefault(first, {})
    if not isinstance(below, dict):
        raise UserError(f"{first} holds {below}, which has no {'.'.join(inner)}; set {first} to keys and values first")
    if "class_path" in below and inner[0] not in ("class_path", "init_args", "dict_kwargs"):
        below = below.setdefault("init_args", {})
    _put(below, inner, value)
