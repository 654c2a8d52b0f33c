"""Every public name of openpipe-art is in artnb, with its parameters and defaults, or its difference is listed."""

from __future__ import annotations

import ast
import fnmatch
import importlib.util
import json
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from art_names import TABLE, differences

import artnb as art
from artnb.compat.differences import DIFFERENCES, matching

ROOT = Path(__file__).parent.parent
DOCS = (ROOT / "docs" / "compatibility.md").read_text()


@pytest.mark.parametrize("version", TABLE)
def test_each_difference_is_listed(version: str) -> None:
    unlisted = {name: what for name, what in differences(version).items() if matching(name) is None}
    assert not unlisted


def test_nothing_is_listed_that_is_no_difference() -> None:
    found = {name for version in TABLE for name in differences(version)}
    elsewhere = ("art.megatron", "art.tinker", "art.pipeline", "art.distributed", "art.trainer_rank", "art.unsloth")
    elsewhere += ("art.preprocessing", "art.loss", "art.mcp", "art.tau_bench", "art.vllm", "art.transformers")
    for difference in DIFFERENCES:
        assert any(matching(name) is difference for name in found), difference
        for pattern in difference.names:
            modules = pattern.rstrip("*") in elsewhere  # modules that the table leaves out
            assert modules or any(_matches(name, pattern) for name in found), pattern


def _matches(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern)


def test_the_docs_have_every_entry() -> None:
    for difference in DIFFERENCES:
        assert difference.instead in DOCS.replace("\n", " "), difference.instead


def test_a_name_that_is_not_there_says_why() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'get_tokenizer'; nothing is tokenized a second time"):
        _ = art.get_tokenizer
    with pytest.raises(AttributeError, match=r"no attribute 'TrainabelModel'$"):
        _ = art.TrainabelModel


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("art_signatures", ROOT / "scripts" / "art_signatures.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["art_signatures"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_script_reads_what_is_there(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wheel like ART's, so that the table that the other tests read is made by a script that works."""
    wheel, table = tmp_path / "openpipe_art-9.9.9-py3-none-any.whl", tmp_path / "table.json"
    with zipfile.ZipFile(wheel, "w") as made:
        made.writestr(
            "art/__init__.py",
            "from .model import TrainableModel\nfrom . import types\n__all__ = ['TrainableModel', 'types']\n",
        )
        made.writestr(
            "art/model.py",
            "from typing import overload\n"
            "class Model:\n    name: str\n    _hidden: int = 1\n"
            "    @property\n    def folder(self): ...\n"
            "class TrainableModel(Model):\n    size: int = 3\n"
            "    def __init__(self, name, *, size=3, path=default()): ...\n"
            "    @overload\n    def go(self): ...\n"
            "    async def go(self, a, b='x', *c, d=None, **e): ...\n"
            "    def _private(self): ...\n",
        )
        made.writestr("art/types.py", "Tools = list\n")
    monkeypatch.setattr(sys, "version_info", (3, 13))
    arguments = ["--table", str(table), "--version", f"9.9.9={wheel}"]
    assert script.main(arguments) == 0
    rows = json.loads(table.read_text())["9.9.9"]
    assert rows == {
        "art.TrainableModel": {"kind": "class"},
        "art.TrainableModel.__init__": {
            "kind": "function",
            "async": False,
            "parameters": [
                ["name", "positional", None],
                ["size", "keyword", "3"],
                ["path", "keyword", "..."],
            ],
        },
        "art.TrainableModel.folder": {"kind": "property"},
        "art.TrainableModel.go": {
            "kind": "function",
            "async": True,
            "parameters": [["a", "positional", None], ["b", "positional", "'x'"], ["d", "keyword", "None"]],
        },
        "art.TrainableModel.name": {"kind": "field", "default": None},
        "art.TrainableModel.size": {"kind": "field", "default": "3"},
        "art.model.Model": {"kind": "class"},
        "art.model.Model.folder": {"kind": "property"},
        "art.model.Model.name": {"kind": "field", "default": None},
        "art.model.TrainableModel": {"kind": "same", "as": "art.TrainableModel"},
        "art.types": {"kind": "module"},
        "art.types.Tools": {"kind": "value"},
    }
    assert script.main(["--check", *arguments]) == 0
    table.write_text(table.read_text().replace('"3"', '"4"'))
    assert script.main(["--check", *arguments]) == 1
    assert "art.TrainableModel.__init__, art.TrainableModel.size" in capsys.readouterr().out


def test_the_table_is_of_the_versions_that_the_script_fetches(script: ModuleType) -> None:
    assert tuple(TABLE) == script.VERSIONS
    for rows in TABLE.values():
        for row in rows.values():
            for _, _, default in row.get("parameters", ()):
                assert default in (None, "...") or ast.literal_eval(default) is not NotImplemented
