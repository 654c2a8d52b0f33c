"""The public names of openpipe-art with their parameters and defaults, as a table that artnb is compared with.

    python scripts/art_signatures.py                 # fetch the versions below from PyPI, write the table
    python scripts/art_signatures.py --check         # fetch, and fail where the table says something else
    python scripts/art_signatures.py --version 0.5.23=openpipe_art-0.5.23-py3-none-any.whl

openpipe-art needs a GPU stack to be imported, so its source is parsed, not run; with Python 3.12 or newer, which it is
written for. The table holds facts only: names, kinds, parameters, and defaults as they are written.
tests/test_compat_signatures.py reads it.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VERSIONS = ("0.5.9", "0.5.23")
"""What ART's notebooks pin where they train locally, and the version whose service protocol artnb speaks."""
TABLE = Path(__file__).parent.parent / "tests" / "art_signatures.json"
MODULES = (
    *("art", "art.auto_trajectory", "art.batches", "art.dev", "art.gather", "art.langgraph", "art.local"),
    *("art.local.backend", "art.model", "art.rewards", "art.rewards.ruler", "art.serverless"),
    *("art.serverless.backend", "art.trajectories", "art.types", "art.utils", "art.utils.format_message"),
    *("art.utils.get_model_step", "art.utils.iterate_dataset", "art.utils.limit_concurrency", "art.utils.litellm"),
    *("art.utils.log_http_errors", "art.utils.retry", "art.utils.sft", "art.utils.strip_logprobs"),
    "art.yield_trajectory",
)
"""Modules that ART's documentation and notebooks import from."""
DETAILED = frozenset(
    (
        *("DatasetBatch", "History", "InitArgs", "InternalModelConfig", "LegacyHistory", "LoRAConfig", "LocalBackend"),
        *("LocalTrainResult", "Model", "OpenAIServerConfig", "PeftArgs", "PydanticException", "SFTChunk"),
        *("ServerlessBackend", "ServerlessTrainResult", "TrainConfig", "TrainResult", "TrainSFTConfig"),
        *("TrainableModel", "Trajectory", "TrajectoryGroup", "TrajectoryScore"),
    )
)
"""Classes that client code builds and calls; of others the name is enough."""
Row = dict[str, Any]
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Source:
    """The source files of one version, parsed when they are asked for."""

    files: dict[str, str]  # module → source
    packages: set[str] = field(default_factory=set)
    _trees: dict[str, ast.Module] = field(default_factory=dict)

    @classmethod
    def of_wheel(cls, path: Path) -> Source:
        made = cls({})
        with zipfile.ZipFile(path) as wheel:
            for name in wheel.namelist():
                if name.startswith("art/") and name.endswith(".py"):
                    module = name.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
                    made.files[module] = wheel.read(name).decode()
                    if name.endswith("/__init__.py"):
                        made.packages.add(module)
        return made

    def tree(self, module: str) -> ast.Module:
        if module not in self._trees:
            self._trees[module] = ast.parse(self.files[module])
        return self._trees[module]

    def names(self, module: str) -> list[str]:
        """`__all__`, or what is defined there without an underscore."""
        defined: list[str] = []
        for node in self.tree(module).body:
            if isinstance(node, ast.Assign) and [getattr(t, "id", "") for t in node.targets] == ["__all__"]:
                return sorted(ast.literal_eval(node.value))
            if isinstance(node, Function | ast.ClassDef):
                defined.append(node.name)
            elif isinstance(node, ast.Assign):
                defined += [t.id for t in node.targets if isinstance(t, ast.Name)]
        return sorted({name for name in defined if not name.startswith("_")})

    def find(self, module: str, name: str) -> tuple[str, ast.stmt] | None:
        """(module, node) of what a name is there, through imports; None for what is not ART's own."""
        found: ast.stmt | None = None
        for node in ast.walk(self.tree(module)):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        base = self._absolute(module, node)
                        if f"{base}.{alias.name}" in self.files:
                            continue  # a submodule
                        return self.find(base, alias.name) if base in self.files else None
        for node in self.tree(module).body:
            if isinstance(node, Function | ast.ClassDef) and node.name == name and not _is_overload(node):
                found = node
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if name in [getattr(t, "id", "") for t in targets]:
                    found = node
        return None if found is None else (module, found)

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = module.split(".")
        base = parts[: len(parts) - node.level + (module in self.packages)]
        return ".".join([*base, *([node.module] if node.module else [])])


def read_table(source: Source) -> dict[str, Row]:
    """Every public name as 'module.name' or 'module.Class.member'."""
    table: dict[str, Row] = {}
    first: dict[int, str] = {}  # node → the name under which it is described
    for module in MODULES:
        if module not in source.files:
            continue
        for name in source.names(module):
            full, found = f"{module}.{name}", source.find(module, name)
            if found is None:
                table[full] = {"kind": "module"}
            elif id(found[1]) in first:
                table[full] = {"kind": "same", "as": first[id(found[1])]}
            elif isinstance(found[1], Function | ast.ClassDef) or name[:1].isupper():
                first[id(found[1])] = full
                _describe(source, full, *found, table)
    return dict(sorted(table.items()))


def _describe(source: Source, name: str, module: str, node: ast.stmt, table: dict[str, Row]) -> None:
    if isinstance(node, Function):
        table[name] = _function(node)
    elif isinstance(node, ast.ClassDef):
        table[name] = {"kind": "class"}
        if node.name in DETAILED:
            for member, row in _members(source, module, node).items():
                table[f"{name}.{member}"] = row
    elif not _is_type_variable(node):
        table[name] = {"kind": "value"}


def _is_type_variable(node: ast.stmt) -> bool:
    call = getattr(node, "value", None)
    return isinstance(call, ast.Call) and getattr(call.func, "id", "") in ("TypeVar", "ParamSpec")


def _members(source: Source, module: str, node: ast.ClassDef) -> dict[str, Row]:
    """Fields, methods and properties, those of base classes in ART too."""
    members: dict[str, Row] = {}
    for base in node.bases:
        base = base.value if isinstance(base, ast.Subscript) else base
        found = source.find(module, base.id) if isinstance(base, ast.Name) else None
        if found is not None and isinstance(found[1], ast.ClassDef):
            members |= _members(source, found[0], found[1])
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            if not item.target.id.startswith("_"):
                members[item.target.id] = {"kind": "field", "default": _written(item.value)}
        elif isinstance(item, Function) and not _is_overload(item) and _is_public(item):
            decorators = {ast.unparse(d) for d in item.decorator_list}
            if decorators & {"property", "cached_property"}:
                members[item.name] = {"kind": "property"}
            elif not any("validator" in d or "serializer" in d or ".setter" in d for d in decorators):
                members[item.name] = _function(item, bound="staticmethod" not in decorators)
    return members


def _is_public(node: Function) -> bool:
    return node.name == "__init__" or not node.name.startswith("_")


def _function(node: Function, *, bound: bool = False) -> Row:
    args = node.args
    positional = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(positional) - len(args.defaults)) + list(args.defaults)
    parameters = [[a.arg, "positional", _written(d)] for a, d in zip(positional, defaults, strict=True)]
    parameters = parameters[1:] if bound else parameters
    parameters += [[a.arg, "keyword", _written(d)] for a, d in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    is_async = isinstance(node, ast.AsyncFunctionDef) and not any(isinstance(n, ast.Yield) for n in ast.walk(node))
    return {"kind": "function", "async": is_async, "parameters": parameters}


def _written(value: ast.expr | None) -> str | None:
    """A default as it is written, "..." for what is no literal; None where there is none."""
    if value is None:
        return None
    try:
        ast.literal_eval(value)
    except ValueError:
        return "..."
    return ast.unparse(value)


def _is_overload(node: Function | ast.ClassDef) -> bool:
    return any(ast.unparse(d) in ("overload", "typing.overload") for d in node.decorator_list)


def fetch(version: str, folder: Path) -> Path:
    """The wheel of a version, without what it depends on."""
    options = ["--no-deps", "--ignore-requires-python", "--only-binary=:all:", "--dest", str(folder), "--quiet"]
    subprocess.run([sys.executable, "-m", "pip", "download", *options, f"openpipe-art=={version}"], check=True)
    (wheel,) = folder.glob(f"openpipe_art-{version}-*.whl")
    return wheel


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the table instead of writing it")
    parser.add_argument("--table", type=Path, default=TABLE)
    parser.add_argument(
        "--version", action="append", default=[], metavar="V[=WHEEL]", help="a version, and its wheel if it is here"
    )
    given = parser.parse_args(arguments)
    if sys.version_info < (3, 12):
        parser.error("openpipe-art is written for Python 3.12: run this with that or a newer one")
    table: dict[str, dict[str, Row]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for asked in given.version or VERSIONS:
            version, _, wheel = asked.partition("=")
            source = Source.of_wheel(Path(wheel) if wheel else fetch(version, Path(folder)))
            table[version] = read_table(source)
            print(f"openpipe-art {version}: {len(table[version])} names")
    if not given.check:
        given.table.write_text(_to_text(table))
        return 0
    known = json.loads(given.table.read_text())
    for version, rows in table.items():
        differing = sorted(n for n in rows.keys() | known[version].keys() if rows.get(n) != known[version].get(n))
        if differing:
            print(f"{version}: the table differs for {', '.join(differing)}")
            return 1
    return 0


def _to_text(table: dict[str, dict[str, Row]]) -> str:
    """JSON with a line for each name, so that a new version of ART is a readable change."""
    versions = []
    for version, rows in table.items():
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
        versions.append(f" {json.dumps(version)}: {{\n{lines}\n }}")
    return "{\n" + ",\n".join(versions) + "\n}\n"


if __name__ == "__main__":
    sys.exit(main())
