"""The one parser of every command: a dataclass's defaults, then YAML files, then flags. A mistake is one line.

    --config base.yaml --config mine.yaml    later files win, flags win over all files, wherever they stand
    base: base.yaml                          in a YAML file: that file, beside it, is read first
    --mlp.rank 32                            every field is a flag, fields of a section with a dot
    --mlp_density 0.1,0.2                    a list, with commas or repeated; a list of texts: --text a.txt b.txt
    --trainer.max_time 00:01:00:00           a field that is a mapping takes any key, at any depth
    --plan                                   a section that may be null: with its defaults
    --api-key K                              dashes within a name are underscores

Mappings are merged, any other value replaces the one before, so does a mapping that names a class_path. What is read is
one configuration for jsonargparse, which checks types, fills in defaults and builds the dataclass.
"""

import argparse
import dataclasses
import functools
import math
import re
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import yaml
from jsonargparse import SUPPRESS, ActionConfigFile, ArgumentParser, DefaultHelpFormatter, set_parsing_settings

from dejavu_train.cli.values import Fields, described, read
from dejavu_train.ground.errors import UserError

T = TypeVar("T")
WRONG_VALUE = re.compile(r'^Parser key "([\w.]+)":.*(?:Got value: |Given value: )(.*)', re.DOTALL)


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


class _ConfigParser(Parser):
    """The parser of one dataclass.

    Besides fields a dataclass may have ``EXAMPLES``, lines to type, and ``COMMON``, the options that ``--help`` shows.
    ``GROUPS`` holds a title and options by name, for ``--help NAME``. Sections are groups as well. ``NOTES`` holds a
    title and what gives a text in place of options. Without ``COMMON`` all options are shown.
    """

    _action_groups: list[Any]

    def __init__(self, fields: Fields, description: str, sections: Sequence[str], documented: bool, prog: str) -> None:
        set_parsing_settings(docstring_parse_attribute_docstrings=documented)
        usage = "%(prog)s [--config FILE] [--option value ...]"
        super().__init__(description=description, usage=usage, formatter_class=_HelpFormatter, prog=prog)
        self.fields, self.help_about = fields, list[str]()  # help_about: what follows --help
        self.add_argument("--config", action=ActionConfigFile, help="YAML file of the options below; may be repeated")
        self.add_class_arguments(fields.kind, None, sub_configs=False, skip=set(fields.optional))
        for name in sections:
            self.add_class_arguments(fields.optional[name], name, sub_configs=False)
        for action in self._actions:
            if action.dest in fields.sections:  # no flag of ours takes a whole section
                action.help = SUPPRESS

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:  # type: ignore[override]
        message = message.removeprefix('Parser key "config": ')  # in which all that was read is handed over
        match = WRONG_VALUE.match(message)
        if match and match[1] in self.fields.types:
            raise UserError(f"--{match[1]} must be {described(self.fields.types[match[1]])}, got {match[2]}") from None
        super().error(message, ex)

    def format_help(self) -> str:
        """The options of the groups that follow ``--help``, all of them with ``all``, the common ones with none.

        Raises:
            UserError: there is no such group.
        """
        kind, asked = self.fields.kind, self.help_about
        common, grouped, notes = (getattr(kind, name, {}) for name in ("COMMON", "GROUPS", "NOTES"))
        titles = {"common": "common options", "options": "options"} | {
            name: title for name, (title, _) in grouped.items()
        }
        listed = {option: name for name, (_, options) in grouped.items() for option in options}
        groups: dict[str, list[argparse.Action]] = {name: [] for name in titles}
        for group in self._action_groups:
            section = "options" if group.title == "options" else ""
            for action in group._group_actions:
                if action.help is SUPPRESS:
                    section = action.dest  # whose fields follow
                    titles[section] = group.title or section
                    continue
                groups.setdefault(section or listed.get(action.dest, "common"), []).append(action)
                if action.dest in common and section:
                    groups["common"].append(action)
        groups["common"].sort(key=lambda action: [*common, action.dest].index(action.dest))
        more = {name: titles[name] for name in groups if name not in ("common", "options") and groups[name]}
        more |= {name: title for name, (title, _) in notes.items()}
        if unknown := [name for name in asked if name not in (*more, "all")]:
            raise UserError(
                f"--help {unknown[0]}: there is no such group of options; there are {', '.join(['all', *more])}"
            )
        if asked and set(asked) <= set(notes):
            return "\n".join(notes[name][1]() for name in asked)
        chosen = asked or (["common", "options"] if common else ["all"])
        shown = [
            types.SimpleNamespace(title=titles[name], description=None, _group_actions=groups[name])
            for name in groups
            if name in chosen or "all" in chosen
        ]
        kept, self._action_groups = self._action_groups, shown
        try:
            text = super().format_help()
        finally:
            self._action_groups = kept
        if not asked and (examples := "".join(f"\n  {example}" for example in getattr(kind, "EXAMPLES", ()))):
            text = text.replace("\n\ncommon options", f"\n\nexamples:{examples}\n\ncommon options", 1)
        if "all" not in chosen:
            lines = [f"  {name:{max(map(len, more)) + 2}}{title}" for name, title in more.items()]
            text += "\n".join(["\nmore options, with --help NAME or --help all:", *lines, ""])
        return text


_fields = functools.cache(Fields)


@functools.cache
def _parser(kind: Any, description: str, sections: tuple[str, ...], documented: bool, prog: str) -> _ConfigParser:
    """Kept, because a command that goes on parses thrice."""
    return _ConfigParser(_fields(kind), description, sections, documented, prog)


def parse(kind: type[T], argv: Sequence[str] | None, prog: str, description: str) -> T:
    """A ``kind``, a dataclass whose sections are dataclasses, from flags (None: those of the process) and YAML files.

    Raises:
        UserError: an unknown key or flag, or a flag that is not UTF-8. A value of the wrong type, or a number that is
    not finite. A file that cannot be read, and what the dataclasses themselves refuse.
    """
    fields: Fields = _fields(kind)  # type: ignore[arg-type]
    values, rest = read(fields, sys.argv[1:] if argv is None else argv)
    helped = "help" in rest
    absent = [name for name in fields.optional if values.get(name) is None and not helped]
    sections = tuple(name for name in fields.optional if name not in absent)
    # Docstrings, for help alone, are read from the source, which takes half of the time.
    parser: _ConfigParser = _parser(kind, description, sections, bool(rest), prog)  # type: ignore[arg-type]
    parser.help_about = rest.get("help", [])
    values = {name: value for name, value in values.items() if name not in absent}
    # What a free mapping holds is taken as it was read: jsonargparse would read texts in it, such as 10:00:00, again,
    # and import the classes that it names.
    free = {name: values.get(name, {}) for name, hint in fields.types.items() if hint == dict[str, Any]}
    flags = [f"--{name}" + "".join(f"={one}" for one in rest[name] if name != "help") for name in rest]
    checked = values if "print_config" in rest else {name: values[name] for name in values if name not in free}
    written = yaml.safe_dump(checked, default_flow_style=True, width=math.inf)
    made = parser.instantiate(parser.parse_args([f"--config={written}", *flags]))
    names = [field.name for field in dataclasses.fields(kind) if field.name not in absent]  # type: ignore[arg-type]
    config = kind(**{name: made[name] for name in names} | dict.fromkeys(absent) | free)
    for name, hint in fields.types.items():  # jsonargparse lets a null of YAML pass for a text
        if name.partition(".")[0] in absent or type(None) in typing.get_args(hint):
            continue
        if functools.reduce(getattr, name.split("."), config) is None:
            raise UserError(f"--{name} must be {described(hint)}, got null")
    _check_finite(dataclasses.asdict(config), "")  # type: ignore[call-overload]
    return config


def _check_finite(value: Any, name: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"--{name} must be a finite number, got {value}")
    for key, entry in value.items() if isinstance(value, Mapping) else ():
        _check_finite(entry, f"{name}.{key}".lstrip("."))
    for entry in value if isinstance(value, list | tuple) else ():
        _check_finite(entry, name)
