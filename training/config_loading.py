"""From a YAML file and dotted overrides to a dataclass of dataclasses, with every mistake reported at once.

YAML is read by the 1.2 core schema: `3e-4` is a number, `off`, `no` and dates are strings; nothing in the file can run
code. pydantic is imported here and nowhere else.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import pydantic
import yaml

from training.errors import UserError

T = TypeVar("T")


class _Yaml12(yaml.SafeLoader):
    """SafeLoader whose plain scalars follow YAML 1.2."""


_Yaml12.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", [*"~nN", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", [*"tTfF"]),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", [*"-+0123456789"]),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan", [*"-+.0123456789"]),
):
    _Yaml12.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first)


def _construct_int(loader: yaml.Loader, node: yaml.ScalarNode) -> int:
    text = loader.construct_scalar(node)
    return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))


_Yaml12.add_constructor("tag:yaml.org,2002:int", _construct_int)


def parse_scalar(text: str) -> Any:
    """A value as it would be read from a YAML file; raises yaml.YAMLError."""
    return yaml.load(text, _Yaml12)  # noqa: S506 (a SafeLoader)


class _Dumper(yaml.SafeDumper):
    """Quotes the strings that YAML 1.2 would read as something else."""


_Dumper.yaml_implicit_resolvers = _Yaml12.yaml_implicit_resolvers


def dump_yaml(values: dict[str, Any]) -> str:
    """Nested plain values as a file that `read_yaml` reads back."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, default_flow_style=False, allow_unicode=True, width=120)


@dataclass
class Entry:
    """One leaf of the configuration: value and where it came from."""

    value: Any
    origin: str
    text: str | None = None  # an override as it was typed


@dataclass
class Source:
    """Dotted key -> Entry, plus the problems met while reading."""

    entries: dict[str, Entry] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def read_yaml(path: str, source: Source, sections: set[str]) -> None:
    """Adds the leaves of a YAML file; `sections` are the dotted keys that must hold a mapping.

    Raises:
        UserError: the file is missing, unreadable or not YAML.
    """
    try:
        loader = _Yaml12(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read config {path}: {getattr(error, 'strerror', None) or error}") from error
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not YAML: {error}") from error
    try:
        node = loader.get_single_node()
        if node is not None:
            _walk(loader, node, "", path, source, sections)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    finally:
        loader.dispose()


def _walk(loader: _Yaml12, node: yaml.Node, prefix: str, path: str, source: Source, sections: set[str]) -> None:
    if not isinstance(node, yaml.MappingNode):
        if prefix and isinstance(node, yaml.ScalarNode) and not node.value:
            return  # a section whose keys are all commented out
        place = f"{path}:{node.start_mark.line + 1}"
        source.problems.append(f"{place}: {prefix or 'the file'} must hold `key: value` lines")
        return
    for key_node, value_node in node.value:
        key = prefix + ("." if prefix else "") + str(loader.construct_object(key_node, deep=True))
        origin = f"{path}:{key_node.start_mark.line + 1}"
        if key in sections:
            _walk(loader, value_node, key, path, source, sections)
        elif key in source.entries and source.entries[key].origin.startswith(f"{path}:"):
            source.problems.append(f"{origin}: {key} stands twice, first at {source.entries[key].origin}")
        else:
            source.entries[key] = Entry(loader.construct_object(value_node, deep=True), origin)


def read_overrides(overrides: Iterable[str], source: Source, sections: set[str]) -> None:
    """Adds `section.key=value` arguments, values in YAML; later ones win."""
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not key:
            source.problems.append(f"argument {text!r} is not of the form section.key=value")
        elif key in sections:
            source.problems.append(f"argument {text!r}: {key} is a section; set one of its keys")
        else:
            try:
                source.entries[key] = Entry(parse_scalar(value), "command line", value)
            except (yaml.YAMLError, ValueError):
                source.entries[key] = Entry(value, "command line", value)


def leaves(cls: type, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> type of every leaf of a dataclass of dataclasses."""
    found = {}
    for name, hint in get_type_hints(cls).items():
        found |= leaves(hint, f"{prefix}{name}.") if dataclasses.is_dataclass(hint) else {f"{prefix}{name}": hint}
    return found


def section_keys(cls: type, prefix: str = "") -> set[str]:
    """Dotted keys that are dataclasses themselves."""
    nested = {f"{prefix}{n}": h for n, h in get_type_hints(cls).items() if dataclasses.is_dataclass(h)}
    return set(nested).union(*(section_keys(hint, f"{key}.") for key, hint in nested.items()))


def build(cls: type[T], source: Source) -> T | None:
    """The dataclass that `source` describes, or None where a required value is missing or wrong.

    Every mistake goes to `source.problems`. A default replaces a wrong value, so that later checks see the rest.
    """
    known = leaves(cls)
    for key, entry in source.entries.items():
        if key not in known:
            source.problems.append(f"{entry.origin}: {key} is not a key{_nearest(key, known)}")
    return _build(cls, "", source)


def _nearest(key: str, known: Iterable[str]) -> str:
    """A key whose own name is near, first in the section that was meant; of a section that is none, near as a whole."""
    section, _, name = key.rpartition(".")
    section_names = {k.rpartition(".")[2]: k for k in known if k.startswith(f"{section}.")}
    matches = [section_names[near] for near in difflib.get_close_matches(name, section_names, n=1, cutoff=0.6)]
    matches += [k for k in known if k.rpartition(".")[2] == name]
    if not section_names:
        matches += difflib.get_close_matches(key, known, n=1, cutoff=0.8)
    return f"; did you mean {matches[0]}?" if matches else ""


def _build(cls: type[T], prefix: str, source: Source) -> T | None:
    values, complete = {}, True
    hints = get_type_hints(cls)
    for item in dataclasses.fields(cls):
        key, hint = f"{prefix}{item.name}", hints[item.name]
        if dataclasses.is_dataclass(hint):
            value = _build(hint, f"{key}.", source)
            complete &= value is not None
        elif key in source.entries and _checked(key, source.entries[key], hint, source.problems):
            value = source.entries[key].value
        elif item.default is not dataclasses.MISSING:
            value = item.default
        elif item.default_factory is not dataclasses.MISSING:
            value = item.default_factory()
        else:
            if key not in source.entries:
                source.problems.append(f"{key} is missing; it has no default")
            complete = False
            continue
        values[item.name] = value
    if not complete:
        return None
    try:
        return cls(**values)
    except ValueError as error:  # a section's own __post_init__
        source.problems += str(error).split("; ")
        instance = object.__new__(cls)
        for name, value in values.items():
            object.__setattr__(instance, name, value)
        return instance


def _checked(key: str, entry: Entry, hint: Any, problems: list[str]) -> bool:
    """Whether the value has the type of its key; puts the coerced value (int where float is asked) into the entry."""
    if entry.text is not None and (hint is str or (hint == str | None and entry.value is not None)):
        entry.value = entry.text  # `run.name=007` is the text that was typed
    kinds = set(get_args(hint)) or {hint}
    if int in kinds and float not in kinds and isinstance(entry.value, float) and entry.value.is_integer():
        entry.value = int(entry.value)  # `train.steps=1e3`
    try:
        entry.value = pydantic.TypeAdapter(hint).validate_json(json.dumps(entry.value), strict=True)
    except (pydantic.ValidationError, TypeError) as error:
        messages = [e["msg"] for e in error.errors()] if isinstance(error, pydantic.ValidationError) else [str(error)]
        message = " or ".join(dict.fromkeys(m[:1].lower() + m[1:] for m in messages))
        if get_origin(hint) is list:
            message += f", in brackets: '{key}=[{entry.value}]', '{key}=[a,b]'"
        problems.append(f"{entry.origin}: {key}={entry.value!r}: {message}")
        return False
    if isinstance(entry.value, float) and not math.isfinite(entry.value):
        problems.append(f"{entry.origin}: {key}={entry.value} is not a finite number")
        return False
    return True
