"""The module `art` as another name of `artnb`: the same modules, not copies of them. Only when asked.

A finder on `sys.meta_path` answers for `art` and what is below it. It loads nothing before it is imported.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from ..errors import ConfigError
from .differences import reason

ALIAS, OURS = "art", "artnb"


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `art…` and loads `artnb…`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != ALIAS and not fullname.startswith(f"{ALIAS}."):
            return None
        found = importlib.util.find_spec(_ours(fullname))
        if found is None:
            why = reason(fullname.removeprefix(f"{ALIAS}."))
            raise ModuleNotFoundError(
                f"{fullname} is a module of ART that artnb has not{f': {why}' if why else ''}", name=fullname
            )
        return importlib.machinery.ModuleSpec(fullname, self, is_package=found.submodule_search_locations is not None)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(_ours(spec.name))
        spec.loader_state = module.__spec__
        # What the package has imported is there under both names: imported again, a module would take the place of what
        # its package has under that name, and art.utils.retry is a function.
        below = f"{module.__name__}."
        for name, inner in list(sys.modules.items()):
            if name.startswith(below):
                sys.modules.setdefault(ALIAS + name.removeprefix(OURS), inner)
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The import system has put the alias' spec on the module, which is artnb's and stays so.
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


_finder: _Finder | None = None


def install() -> ModuleType:
    """From now on `import art` in this process gives artnb. May be called again. Returns the module.

    It comes before an installed openpipe-art. Raises ConfigError when ART itself is imported already: the names that
    were taken from it would stay its own.
    """
    global _finder
    there = sys.modules.get(ALIAS)
    ours = importlib.import_module(OURS)
    if there is not None and there is not ours:
        raise ConfigError(
            f"art is imported already, from {getattr(there, '__file__', None) or repr(there)}: call "
            "artnb.compat.install() before anything imports art, in a fresh kernel"
        )
    if _finder is None:
        _finder = _Finder()
        sys.meta_path.insert(0, _finder)
    return importlib.import_module(ALIAS)


def uninstall() -> None:
    """`import art` is no longer artnb's business. What was imported stays as it is. May be called again."""
    global _finder
    if _finder is None:
        return
    sys.meta_path.remove(_finder)
    _finder = None
    for name, module in list(sys.modules.items()):
        if (name == ALIAS or name.startswith(f"{ALIAS}.")) and module is sys.modules.get(_ours(name)):
            del sys.modules[name]


def installed() -> bool:
    """Whether `import art` gives artnb here."""
    return _finder is not None


def _ours(name: str) -> str:
    return OURS + name.removeprefix(ALIAS)


def run(arguments: list[str]) -> None:
    """Run a script or, after -m, a module in which `import art` gives artnb; `arguments` are the command line's."""
    install()
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(arguments[0]).resolve().parent))  # as python itself does it
        runpy.run_path(arguments[0], run_name="__main__")
