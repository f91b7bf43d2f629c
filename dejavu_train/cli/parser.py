"""The one parser of every command: a dataclass's defaults, then YAML files, then flags. A mistake is one line.

    --config base.yaml --config mine.yaml    later files win, flags win over all files, wherever they stand
    base: base.yaml                          in a YAML file: that file, beside it, is read first
    --mlp.rank 32                            every field is a flag, fields of a section with a dot
    --densities 0.1,0.2                      a list, with commas or repeated; a list of texts: --text a.txt b.txt
    --trainer.max_time 00:01:00:00           a field that is a mapping takes any key, at any depth
    --generation                             a section that may be null: with its defaults
    --api-key K                              dashes within a name are underscores

Mappings are merged, any other value replaces the one before, so does a mapping that names a class_path.
"""

import argparse
import copy
import dataclasses
import difflib
import functools
import json
import math
import re
import sys
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import yaml
from jsonargparse import (
    SUPPRESS,
    ActionConfigFile,
    ArgumentParser,
    DefaultHelpFormatter,
    get_loader,
    set_parsing_settings,
)

from dejavu_train.cli.field_types import (
    described,
    fields_of,
    hints_of,
    is_list,
    is_mapping,
    item_of,
    may_be,
    section_of,
)
from dejavu_train.cli.flags import options
from dejavu_train.ground.errors import UserError

T = TypeVar("T")
INSTALLED = Path(__file__).parents[1]  # its folder configs is that of the repository
WRONG_VALUE = re.compile(r'^Parser key "([\w.]+)":.*(?:Got value: |Given value: )(.*)', re.DOTALL)
_CLOCK = re.compile(r"\d+(:\d+)+")  # YAML 1.1 takes 10:00:00 for a number to the base of 60


class Parser(ArgumentParser):
    """jsonargparse's, which raises a mistake as :class:`UserError` and never expands an abbreviation."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options | {"allow_abbrev": False})

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:  # type: ignore[override]
        raise UserError(" ".join(message.split())) from None


class _HelpFormatter(DefaultHelpFormatter):
    """Says what an option is for and its default. A wrong value is told with the type."""

    def _get_help_string(self, action: argparse.Action) -> str:
        default = "" if action.default in (SUPPRESS, None, "", (), {}) else " (default: %(default)s)"
        return (action.help or "").replace("``", "") + default


def _group(title: str, actions: list[argparse.Action]) -> Any:
    return types.SimpleNamespace(title=title, description=None, _group_actions=actions)


class _ConfigParser(Parser):
    """The parser of one dataclass, which knows the types of its fields.

    Besides fields a dataclass may have ``EXAMPLES``, lines to type, and ``COMMON``, the options that ``--help`` shows.
    ``GROUPS`` holds a title and options by name, for ``--help NAME``. Sections are groups as well. ``NOTES`` holds a
    title and what gives a text in place of options. Without ``COMMON`` all options are shown. ``sections`` are those
    to have of the sections that may be null. ``documented``: options have the docstrings of their fields.
    """

    _action_groups: list[Any]

    def __init__(
        self, kind: type[Any], description: str, sections: Iterable[str], documented: bool, **options: Any
    ) -> None:
        set_parsing_settings(docstring_parse_attribute_docstrings=documented)
        usage = "%(prog)s [--config FILE] [--option value ...]"
        super().__init__(description=description, usage=usage, formatter_class=_HelpFormatter, **options)
        self.kind = kind
        self.help_about: Sequence[str] = ()  # what follows --help
        self.sections, self.types = fields_of(kind)
        self.optional = {name: part for name, hint in hints_of(kind) if (part := section_of(hint)) not in (None, hint)}
        self.gone: Mapping[str, str] = getattr(kind, "GONE", {})  # keys of earlier versions: what to give instead
        self.meant: Mapping[str, str] = getattr(kind, "MEANT", {})  # keys of other commands: this one's
        self.add_argument("--config", action=ActionConfigFile, help="YAML file of the options below; may be repeated")
        self.add_class_arguments(kind, None, sub_configs=False, skip=set(self.optional))
        for name in sections:
            self.add_class_arguments(self.optional[name], name, sub_configs=False)
        for action in self._actions:
            if action.dest in self.sections:  # no flag of ours takes a whole section
                action.help = SUPPRESS

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:  # type: ignore[override]
        message = message.removeprefix('Parser key "config": ')  # in which all files are handed over
        match = WRONG_VALUE.match(message)
        if match and match[1] in self.types:
            raise UserError(f"--{match[1]} must be {described(self.types[match[1]])}, got {match[2]}") from None
        super().error(message, ex)

    def format_help(self) -> str:
        """The options of the groups that follow ``--help``, all of them with ``all``, the common ones with none.

        Raises:
            UserError: there is no such group.
        """
        common, grouped = getattr(self.kind, "COMMON", ()), getattr(self.kind, "GROUPS", {})
        notes = getattr(self.kind, "NOTES", {})
        titles = {"common": "common options", "options": "options"} | {
            name: title for name, (title, _) in grouped.items()
        }
        groups: dict[str, list[argparse.Action]] = {name: [] for name in titles}
        for group in self._action_groups:
            named = "options" if group.title == "options" else ""
            for action in group._group_actions:
                if action.help is SUPPRESS:
                    named = action.dest  # a section, whose fields follow
                    titles[named] = group.title or named
                    continue
                listed = next((name for name, (_, names) in grouped.items() if action.dest in names), "common")
                groups.setdefault(named or listed, []).append(action)
                if action.dest in common and named:
                    groups["common"].append(action)
        groups["common"].sort(key=lambda action: [*common, action.dest].index(action.dest))
        others = [name for name in groups if name not in ("common", "options") and groups[name]]
        for name in self.help_about:
            if name not in (*others, *notes, "all"):
                known = ", ".join((*others, *notes))
                raise UserError(f"--help {name}: there is no such group of options; there are all, {known}")
        if self.help_about and set(self.help_about) <= set(notes):
            return "\n".join(notes[name][1]() for name in self.help_about)
        chosen = self.help_about or (["common", "options"] if common else ["all"])
        shown = [name for name in groups if name in chosen or "all" in chosen]
        kept, self._action_groups = self._action_groups, [_group(titles[name], groups[name]) for name in shown]
        try:
            text = super().format_help()
        finally:
            self._action_groups = kept
        examples = getattr(self.kind, "EXAMPLES", ())
        if examples and not self.help_about:
            lines = "\n".join(f"  {example}" for example in examples)
            text = text.replace("\n\ncommon options", f"\n\nexamples:\n{lines}\n\ncommon options", 1)
        if "all" not in chosen:
            width = max(map(len, (*others, *notes))) + 2
            about = {name: titles[name] for name in others} | {name: title for name, (title, _) in notes.items()}
            listed_groups = [f"  {name:{width}}{title}" for name, title in about.items()]
            text += "\n".join(["\nmore options, with --help NAME or --help all:", *listed_groups, ""])
        return text

    def file(self, path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
        """The values of a YAML file, laid over those of the file that it names as its ``base``.

        ``configs/NAME.yaml`` that is not there is the one that is installed with the package. above: files whose base
        this one is.
        """
        if path.parts[:1] == ("configs",) and not path.exists() and (INSTALLED / path).exists():
            path = INSTALLED / path
        if path.resolve() in above:
            raise UserError(f"the config file {path} is its own base, named by {above[-1]}; name another one there")
        try:
            text = path.read_text(encoding="utf-8")
            values, double = get_loader("yaml")(text) or {}, _double_key(yaml.compose(text, yaml.SafeLoader))
        except FileNotFoundError:
            raise UserError(
                f"there is no config file {path}; give a YAML file, such as configs/opt-mini.yaml"
            ) from None
        except (UnicodeDecodeError, yaml.YAMLError, IsADirectoryError) as error:
            raise UserError(f"the config file {path} is not readable YAML: {error}") from None
        if not isinstance(values, dict):
            raise UserError(f"the config file {path} must hold keys and values, got {values}")
        if double is not None:
            raise UserError(f"the config file {path} has {double} twice; write it once, with all that is below it")
        base = values.pop("base", None)
        if not isinstance(base, str | None) or base == "":
            raise UserError(f"the config file {path}: base must name another YAML file, got {base}")
        self._check_keys(values, "", path)
        return values if base is None else merged(self.file(path.parent / base, (*above, path.resolve())), values)

    def _check_keys(self, values: Mapping[Any, Any], prefix: str, path: Path) -> None:
        for key, value in values.items():
            name = f"{prefix}{key}"
            if name in self.sections:
                if value is None and name in self.optional:
                    continue
                if not isinstance(value, dict):
                    raise UserError(f"the config file {path}: {name} must hold keys and values, got {value}")
                self._check_keys(value, f"{name}.", path)
            elif name not in self.types:
                raise UserError(f"the config file {path} has the unknown key {name}{self._meant(name)}")
            elif is_mapping(self.types[name]) and not may_be(value, self.types[name]):
                raise UserError(f"the config file {path}: {name} must hold keys and values, got {value}")

    def _meant(self, name: str) -> str:
        instead = self.gone.get(name.partition(".")[0])
        if instead is not None:
            return f", which is no longer there; {instead}"
        if f"{name}.source" in self.types:
            return f" without a value; write --{name} FILE"
        if name in self.sections:
            return f" with a value; its keys are options, such as --{next(k for k in self.types if k.startswith(name))}"
        last = name.rpartition(".")[2]
        known = self.meant.get(name, last)
        close = [known] if known in self.types else difflib.get_close_matches(name, self.types, 1)
        return f"; did you mean {close[0]}?" if close else "; --help lists the known ones"

    def read(self, argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
        """The values of all files and of the flags of mappings, and the other flags as jsonargparse expects them."""
        free = [name for name, kind in self.types.items() if is_mapping(kind)]
        values: dict[str, Any] = _nested(
            {n: copy.deepcopy(default) for n in free if isinstance(default := self.get_default(n), dict) and default}
        )
        flags: dict[str, list[str]] = {}
        mappings: dict[str, Any] = {}
        rest = []
        self.help_about = ()
        for named, given, _ in options(argv):
            name = f"{named}.source" if given and f"{named}.source" in self.types else named  # --text FILE
            section = next((known for known in free if name == known or name.startswith(f"{known}.")), None)
            if name == "config":
                if not all(given) or not given:
                    raise UserError("--config needs a value: a YAML file, such as configs/opt-mini.yaml")
                for path in given:
                    values = merged(values, self.file(Path(path)))
            elif name in self.optional and (not given or given == ["null"]):
                mappings[name] = None if given else {}
            elif section and given:
                keys = [part for part in name.removeprefix(section).split(".") if part]
                self._lay(mappings, section, keys, given[-1])
            elif name in self.types:
                flags.setdefault(name, [])
                flags[name] = flags[name] + given if is_list(self.types[name]) else given[-1:]
            elif name == "help":
                self.help_about = given
                rest.append("--help")
            elif name == "print_config":
                rest.append(f"--{name}" + "".join(f"={value}" for value in given))
            else:
                raise UserError(f"unknown option --{name}{self._meant(name)}")
        values = merged(values, _nested(mappings))
        written = [self._flag(name, given) for name, given in flags.items()]
        return values, [*written, *rest]

    def _lay(self, mappings: dict[str, Any], section: str, keys: Sequence[str], given: str) -> None:
        """Lay what a flag gives for a field that may be a mapping over what earlier flags gave for it."""
        value = _load(section, given)
        if keys:
            _put(mappings, [section, *keys], value)
        elif isinstance(value, dict):
            before = mappings.get(section)
            mappings[section] = merged(before if isinstance(before, dict) else {}, value)
        elif typing.get_origin(self.types[section]) is dict:
            raise UserError(f"--{section} must hold keys and values, got {given}; write --{section}.KEY VALUE")
        else:
            mappings[section] = given if value is not None else None

    def _flag(self, name: str, given: Sequence[str]) -> str:
        kind = self.types[name]
        if is_list(kind):
            if len(given) == 1 and given[0].startswith("["):
                return f"--{name}={given[0]}"
            if item_of(kind) is str:
                is_texts = typing.get_origin(kind) is not tuple  # one or several; names of files may hold commas
                items = given if is_texts else [part for one in given for part in one.split(",") if part]
                return f"--{name}={json.dumps(list(items))}"
            return f"--{name}=[{','.join(part for part in given if part)}]"
        if not given:
            if kind is not bool:
                raise UserError(f"--{name} needs a value: {described(kind)}")
            given = ["true"]
        return f"--{name}={given[0]}"


@functools.cache
def _parser(
    kind: type[Any], description: str, prog: str, documented: bool, sections: tuple[str, ...] = ()
) -> _ConfigParser:
    """Kept, because a command that goes on parses thrice."""
    return _ConfigParser(kind, description, sections, documented, prog=prog)


def _underscored(word: str, known: Iterable[str]) -> str:
    """A word of a command line. Of an option whose name was written with dashes it has underscores."""
    name, equals, value = word.partition("=")
    meant = name[2:].replace("-", "_")
    return f"--{meant}{equals}{value}" if name.startswith("--") and meant in known else word


def parse(kind: type[T], argv: Sequence[str] | None, prog: str, description: str) -> T:
    """A ``kind``, a dataclass whose sections are dataclasses, from flags (None: those of the process) and YAML files.

    Raises:
        UserError: an unknown key or flag, or a flag that is not UTF-8. A value of the wrong type, or a number that is
    not finite. A file that cannot be read, and what the dataclasses themselves refuse.
    """
    argv = sys.argv[1:] if argv is None else argv
    for flag in argv:
        if any("\ud800" <= character <= "\udfff" for character in flag):  # how Python hands over other bytes
            raise UserError(f"{ascii(flag)} is not UTF-8; neither texts nor paths of another encoding are taken")
    # Docstrings are read from the source, which takes half of the time.
    documented = any(word.partition("=")[0] in ("-h", "--help", "--print_config") for word in argv)
    parser_of = functools.partial(_parser, kind, description, prog, documented)  # type: ignore[arg-type]
    parser = parser_of()
    values, flags = parser.read([_underscored(word, parser.types) for word in argv])
    given = {name for name in parser.optional if values.get(name) is not None}
    given |= {flag[2:].partition(".")[0] for flag in flags}
    absent = [name for name in parser.optional if name not in given and "--help" not in flags]
    sections = tuple(name for name in parser.optional if name not in absent)
    if sections:
        about, parser = parser.help_about, parser_of(sections)
        parser.help_about = about
    values = {name: value for name, value in values.items() if name not in absent}
    # What a free mapping holds is taken as it was read: jsonargparse would read texts in it, such as 10:00:00, again,
    # and import the classes that it names.
    free = {name: values.get(name, {}) for name, hint in parser.types.items() if hint == dict[str, Any]}
    if not any(flag.startswith("--print_config") for flag in flags):
        values = {name: value for name, value in values.items() if name not in free}
    written = yaml.safe_dump(values, default_flow_style=True, width=math.inf)
    instances = parser.instantiate(parser.parse_args([f"--config={written}", *flags]))
    names = [field.name for field in dataclasses.fields(kind) if field.name not in absent]  # type: ignore[arg-type]
    config = kind(**{name: instances[name] for name in names} | dict.fromkeys(absent) | free)
    for name, hint in parser.types.items():  # jsonargparse lets a null of YAML pass for a text
        if name.partition(".")[0] in absent or type(None) in typing.get_args(hint):
            continue
        if functools.reduce(getattr, name.split("."), config) is None:
            raise UserError(f"--{name} must be {described(hint)}, got null")
    _check_finite(dataclasses.asdict(config), "")  # type: ignore[call-overload]
    return config


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """``above`` laid over ``below``: mappings are merged, unless the upper one names a class. Other values replace."""
    result = dict(below)
    for key, value in above.items():
        before = result.get(key)
        if isinstance(value, dict) and isinstance(before, dict) and "class_path" not in value:
            result[key] = merged(before, value)
        else:
            result[key] = value
    return result


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
    """A value of a free mapping, read as YAML."""
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


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """``{"a.b": 1}`` as ``{"a": {"b": 1}}``."""
    made: dict[str, Any] = {}
    for name, value in flat.items():
        *outer, last = name.split(".")
        below = made
        for key in outer:
            below = below.setdefault(key, {})
        below[last] = value
    return made


def _check_finite(value: Any, name: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"--{name} must be a finite number, got {value}")
    if isinstance(value, dict):
        for key, entry in value.items():
            _check_finite(entry, f"{name}.{key}".lstrip("."))
    if isinstance(value, (list, tuple)):
        for entry in value:
            _check_finite(entry, name)
