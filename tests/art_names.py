"""Where artnb differs from the recorded names of openpipe-art: what is missing, and parameters that do not fit."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

import pydantic

TABLE: dict[str, dict[str, dict[str, Any]]] = json.loads((Path(__file__).parent / "art_signatures.json").read_text())
NOTHING = object()


def resolve(name: str) -> Any:
    """What `from art.module import name` gives in artnb, or NOTHING."""
    module, _, last = name.rpartition(".")
    try:
        return getattr(importlib.import_module("artnb" + module.removeprefix("art")), last, NOTHING)
    except ImportError:
        return NOTHING


def differences(version: str) -> dict[str, str]:
    """'name' or 'name(parameter)' → what differs, for every recorded name that artnb has not as it is there."""
    table = TABLE[version]
    found: dict[str, str] = {}
    for name, row in table.items():
        owner = name.rpartition(".")[0]
        if table.get(owner, {}).get("kind") == "class":
            if owner not in found:
                _member(owner, name.rpartition(".")[2], row, found)
        elif (ours := resolve(name)) is NOTHING:
            found[name] = "missing"
        elif row["kind"] == "function":
            _function(name, ours, row, found)
    return found


def _member(owner: str, member: str, row: dict[str, Any], found: dict[str, str]) -> None:
    ours, name = resolve(owner), f"{owner}.{member}"
    if row["kind"] == "field":
        default = _default_of(ours, member)
        if default is NOTHING:
            if not issubclass(ours, dict):
                found[name] = "missing"
        elif not _same(row["default"], default):
            found[name] = f"default {default!r} instead of {row['default']}"
    elif not hasattr(ours, member):
        found[name] = "missing"
    elif row["kind"] == "function":
        _function(name, getattr(ours, member), row, found)


def _default_of(ours: type, member: str) -> Any:
    """A field's default, inspect.Parameter.empty where there is none, NOTHING where there is no such field."""
    if is_dataclass(ours):
        for f in fields(ours):
            if f.name == member:
                return f.default if f.default is not MISSING or f.default_factory is MISSING else f.default_factory()
        return NOTHING
    if issubclass(ours, pydantic.BaseModel):
        info = ours.model_fields.get(member)
        return NOTHING if info is None else info.get_default(call_default_factory=True)
    parameters = _parameters(ours)
    if member in parameters:
        return parameters[member].default
    return getattr(ours, member, NOTHING) if member != "trainable" else ours.trainable  # type: ignore[attr-defined]


def _function(name: str, ours: Any, row: dict[str, Any], found: dict[str, str]) -> None:
    if name.endswith(".__init__"):
        ours = resolve(name.removesuffix(".__init__"))
    known = _parameters(ours)
    open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values())
    positional = [n for n, p in known.items() if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    for place, (parameter, kind, default) in enumerate(row["parameters"]):
        full = f"{name}({parameter})"
        if parameter not in known:
            if not open_ended:
                found[full] = "missing"
        elif kind == "positional" and (place >= len(positional) or positional[place] != parameter):
            found[full] = "in another place"
        elif default is None and known[parameter].default is not inspect.Parameter.empty:
            continue  # ART needs it, artnb does not
        elif not _same(default, known[parameter].default):
            found[full] = f"default {known[parameter].default!r} instead of {default}"
    needed = {n for n, p in known.items() if p.default is inspect.Parameter.empty and p.kind.name not in _VARIADIC}
    if extra := needed - {parameter for parameter, _, _ in row["parameters"]}:
        found[f"{name}(+)"] = f"needs {sorted(extra)}"
    if row["async"] != inspect.iscoroutinefunction(ours) and not name.endswith(".__init__"):
        found[f"{name}(await)"] = "is not awaited" if row["async"] else "is awaited"


_VARIADIC = ("VAR_KEYWORD", "VAR_POSITIONAL")


def _parameters(ours: Any) -> dict[str, inspect.Parameter]:
    """Without self. A class takes what its __init__s take, through **options too."""
    if isinstance(ours, type):
        merged: dict[str, inspect.Parameter] = {}
        for kind in ours.__mro__:
            init = vars(kind).get("__init__")
            if init is None or kind is object:
                continue
            own = dict(list(inspect.signature(init).parameters.items())[1:])
            variadic = [n for n, p in own.items() if p.kind.name == "VAR_KEYWORD"]
            merged |= {n: p for n, p in own.items() if n not in merged and p.kind.name not in _VARIADIC}
            if not variadic:
                break
        return merged
    parameters = dict(inspect.signature(ours).parameters)
    parameters.pop("self", None)
    return parameters


def _same(written: str | None, default: Any) -> bool:
    if written is None:
        return True  # what has no default there may have one here
    if written == "...":
        return default is not inspect.Parameter.empty  # no literal: that there is one is all that can be compared
    wanted = ast.literal_eval(written)
    if isinstance(default, tuple) and isinstance(wanted, list):
        default = list(default)
    return bool(wanted == default) or str(wanted) == str(default)
