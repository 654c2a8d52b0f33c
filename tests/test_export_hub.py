"""Pushing to the hub, with the real huggingface_hub against a local server that speaks its API; not the real hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("huggingface_hub")

from fake_hub import GOOD_TOKEN, FakeHub
from test_export import make_adapter

import artnb as art
from artnb.errors import ConfigError
from artnb.hub import check_repo_id
from artnb.training.checkpoints import CheckpointStore

# A process of its own: huggingface_hub reads its endpoint and HF_HUB_OFFLINE when it is imported.
PUSHES = """
import asyncio, json, sys
import artnb as art

path, base, good, calls = sys.argv[1], sys.argv[2], sys.argv[3], json.loads(sys.argv[4])
model = art.TrainableModel("agent", "tests", base, lora=art.LoraConfig(r=4), base_path=path)
for call in calls:
    try:
        print(asyncio.run(model.push_to_hub(**{"token": good, **call})))
    except art.ArtnbError as error:
        print(type(error).__name__, getattr(error, "status", ""), error)
"""


@pytest.fixture(scope="module")
def art_path(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A backend's path with a model that has checkpoint 3."""
    root = tmp_path_factory.mktemp("push")
    adapter = make_adapter(tiny_base, root / "adapter")

    def write(folder: Path) -> None:
        for file in adapter.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        (folder / "optimizer.safetensors").write_bytes(b"state")

    CheckpointStore(root / "art" / "tests" / "models" / "agent").save(3, write, {"base_model": str(tiny_base)})
    return root / "art"


def push(path: Path, base: Path, endpoint: str, *calls: dict[str, Any], **env: str) -> list[str]:
    known = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    mine = {"HF_ENDPOINT": endpoint, "HF_HOME": str(path / "hf"), "HF_HUB_DISABLE_XET": "1", **env}
    done = subprocess.run(
        [sys.executable, "-c", PUSHES, str(path), str(base), GOOD_TOKEN, json.dumps(calls)],
        env=known | mine,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "hf_" not in done.stdout and GOOD_TOKEN not in done.stderr, "a token is told to nobody"
    return done.stdout.splitlines()


def test_an_adapter_and_a_merged_model_are_pushed(tiny_base: Path, art_path: Path) -> None:
    with FakeHub() as hub:
        lines = push(
            art_path,
            tiny_base,
            hub.url,
            {"repo_id": "me/agent"},
            {"repo_id": "me/agent"},
            {"repo_id": "me/agent", "revision": "step-3", "commit_message": "a branch"},
            {"repo_id": "me/whole", "format": "merged", "dtype": "bfloat16", "private": False},
            {"repo_id": "you/agent"},
            {"repo_id": "me/agent", "token": "hf_wrong"},
            {"repo_id": "me/agent", "step": 7},
        )
        assert lines[:4] == [f"{hub.url}/me/{name}" for name in ("agent", "agent", "agent", "whole")]
        assert lines[4].startswith("ServiceError 403 push_to_hub: the hub refused you/agent (403): You don't have")
        assert "the token may not write there" in lines[4]
        assert lines[5].startswith("ServiceError 401 ") and "`hf auth login`" in lines[5]
        assert lines[6].startswith("CheckpointError") and "there is no checkpoint 7" in lines[6]
        adapter, branch = hub.files["me/agent", "main"], hub.files["me/agent", "step-3"]
        assert sorted(adapter) == ["README.md", "adapter_config.json", "adapter_model.safetensors"]
        checkpoint = art_path / "tests" / "models" / "agent" / "checkpoints" / "0003"
        assert adapter["adapter_model.safetensors"] == (checkpoint / "adapter_model.safetensors").read_bytes()
        assert branch == adapter
        whole = hub.files["me/whole", "main"]
        assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= set(whole)
        assert not [name for name in whole if name.startswith("artnb") or "adapter" in name]
        visible = [hub.repos[repo].get("visibility") or hub.repos[repo].get("private") for repo in hub.repos]
        assert visible in (["private", "public"], [True, False])
        card = adapter["README.md"].decode()
        assert "library_name: peft" in card and "- artnb" in card and "checkpoint 3" in card
        assert str(tiny_base) not in card, "a folder of this machine is no base model for others"
        assert "vllm serve me/whole --served-model-name agent" in whole["README.md"].decode()


def test_a_hub_that_cannot_be_reached_and_one_that_is_switched_off(tiny_base: Path, art_path: Path) -> None:
    with FakeHub() as hub:
        gone = hub.url
    call = {"repo_id": "me/agent"}
    (line,) = push(art_path, tiny_base, gone, call)
    assert line.startswith("ServiceError None push_to_hub: the hub could not be reached")
    (line,) = push(art_path, tiny_base, gone, call, HF_HUB_OFFLINE="1")
    assert line.startswith("ServiceError None push_to_hub: HF_HUB_OFFLINE is set")


NO_REPOSITORIES = ["agent", "me/", "/agent", "me/a/b", "me/../you", "me/a..b", "me/a--b", "me/a b", "../a/b", "", "a/-"]


@pytest.mark.parametrize("repo_id", NO_REPOSITORIES)
async def test_names_that_are_no_repository(tiny_base: Path, repo_id: str) -> None:
    with pytest.raises(ConfigError, match="must be owner/name"):
        await art.TrainableModel("agent", "tests", tiny_base).push_to_hub(repo_id)


def test_names_that_are() -> None:
    for repo_id in ("me/agent", "Me-2/agent_1.5"):
        assert check_repo_id(repo_id) == repo_id
