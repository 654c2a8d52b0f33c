"""Forks: a model that starts from another's checkpoint, an earlier step or a PEFT folder; and what is refused."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from agents import even_groups
from safetensors.torch import load_file
from tiny_models import make_model

import artnb as art
from artnb.errors import CheckpointError, ConfigError, ModelError
from artnb.training.adapter_shape import adapter_shapes, check_adapter, read_adapter_shapes

LORA = art.LoraConfig(r=4)
FAST = art.TrainConfig(learning_rate=5e-3)
WEIGHTS = "adapter_model.safetensors"
ASKED: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]


def new(base: Path, name: str, *, lora: art.LoraConfig = LORA, project: str = "tests") -> art.TrainableModel:
    return art.TrainableModel(name, project, base, lora=lora)


def backend_at(path: Path) -> art.LocalBackend:
    return art.LocalBackend(path=path, device="cpu", dtype="float32", verbose=False)


def said(model: art.TrainableModel, step: int | None = None) -> list[int]:
    answer = model.chat(ASKED, step=step, temperature=0, max_tokens=12, extra_body={"ignore_eos": True})
    return list(answer.choices[0].model_extra["token_ids"])  # type: ignore[index]


async def trained(model: art.TrainableModel, until: int) -> list[float]:
    losses = []
    for step in range(await model.get_step(), until):
        losses.append((await model.train(await even_groups(model, step), FAST)).metrics["loss"])
    return losses


@pytest.fixture(scope="module")
def made(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A backend's path with a model of three steps."""
    path = tmp_path_factory.mktemp("fork") / "art"

    async def make() -> None:
        async with backend_at(path) as backend:
            model = new(tiny_base, "origin")
            await model.register(backend)
            await trained(model, 3)

    asyncio.run(make())
    return path


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "art"))


def checkpoint(root: Path, name: str, step: int, project: str = "tests") -> Path:
    return root / project / "models" / name / "checkpoints" / f"{step:04d}"


async def test_a_fork_goes_on_where_its_origin_was(tiny_base: Path, root: Path) -> None:
    """The same step, optimizer and random state: its next step is the step that the origin made."""
    async with backend_at(root) as backend:
        origin, fork = new(tiny_base, "origin"), new(tiny_base, "fork", project="other")
        assert await backend.fork_checkpoint(fork, from_model="origin", from_project="tests", step=2) == 2
        await origin.register(backend)
        await fork.register(backend)
        assert await fork.get_step() == 2 and await fork.checkpoints() == [2]
        assert said(fork) == said(origin, step=2) != said(origin)
        again = await fork.train(await even_groups(fork, 2), FAST)
        assert again.step == 3 and again.checkpoint_path is not None
        mine, theirs = (load_file(p / WEIGHTS) for p in (again.checkpoint_path, checkpoint(root, "origin", 3)))
        assert mine.keys() == theirs.keys()
        assert all(torch.allclose(mine[name], theirs[name], atol=1e-5) for name in mine)
        run = json.loads((root / "other" / "models" / "fork" / "run.json").read_text())
        assert run["forked_from"] == {"project": "tests", "name": "origin", "step": 2}
        assert await origin.get_step() == 3 and await origin.checkpoints() == [0, 1, 2, 3], "the origin is as it was"


async def test_the_optimizer_comes_along_from_a_model_and_not_from_a_folder(tiny_base: Path, root: Path) -> None:
    async with backend_at(root) as backend:
        whole, bare = new(tiny_base, "whole"), new(tiny_base, "bare")
        assert await backend.fork_checkpoint(whole, from_model="origin") == 3
        assert await backend.fork_checkpoint(bare, from_path=checkpoint(root, "origin", 3)) == 0
        for model in (whole, bare):
            await model.register(backend)
        updates = [
            backend._models[name].trainer.state_dict()["optimizer"]["updates"]  # type: ignore[union-attr]
            for name in ("whole", "bare")
        ]
        assert updates == [3.0, 0.0]
        assert said(whole) == said(bare)
        result = await bare.train(await even_groups(bare, 0), FAST)
        assert result.step == 1 and result.trained
        # A step that fails puts a model back that has no optimizer on disk.
        fresh = new(tiny_base, "fresh")
        await backend.fork_checkpoint(fresh, from_path=checkpoint(root, "origin", 3))
        await fresh.register(backend)
        before = said(fresh)
        loaded = backend._models["fresh"]
        with torch.no_grad():
            next(iter(loaded.served().policy.adapter_parameters(loaded.adapter).values())).add_(1.0)
        loaded.undo()
        assert said(fresh) == before


async def test_the_newest_one_not_after_a_step(tiny_base: Path, root: Path) -> None:
    async with backend_at(root) as backend:
        shutil.rmtree(checkpoint(root, "origin", 2))
        assert await backend.fork_checkpoint(new(tiny_base, "a"), "origin", not_after_step=2) == 1
        with pytest.raises(CheckpointError, match=r"there is no checkpoint 2 in .*complete ones: 0, 1, 3"):
            await backend.fork_checkpoint(new(tiny_base, "b"), "origin", step=2)
        assert not (root / "tests" / "models" / "b" / "checkpoints").exists()


async def test_a_cell_that_is_run_again_changes_nothing(tiny_base: Path, root: Path) -> None:
    async with backend_at(root) as backend:
        fork = new(tiny_base, "fork")
        for _ in range(2):
            assert await backend.fork_checkpoint(fork, from_model="origin", step=1) == 1
        await fork.register(backend)
        await trained(fork, 2)
        assert await backend.fork_checkpoint(fork, from_model="origin", step=1) == 2, "it has gone on since"
        await backend.delete_checkpoints(fork, [1])
        assert await backend.fork_checkpoint(fork, from_model="origin", step=1) == 2
        with pytest.raises(CheckpointError, match=r"checkpoints of its own \(2\) in .*before it is registered"):
            await backend.fork_checkpoint(fork, from_model="origin", step=3)
        with pytest.raises(ConfigError, match="was made with lora="):
            await backend.fork_checkpoint(new(tiny_base, "fork", lora=art.LoraConfig(r=8)), from_model="origin", step=1)
        # Killed between the checkpoint and run.json: it is known by its checkpoint.
        half = new(tiny_base, "half")
        await backend.fork_checkpoint(half, from_model="origin", step=1)
        (root / "tests" / "models" / "half" / "run.json").unlink()
        assert await backend.fork_checkpoint(half, from_model="origin", step=1) == 1


@pytest.mark.parametrize("name", ["../origin", "..", "a/b", "a\\b", "origin/../origin", "x\0", ""])
async def test_names_that_lead_elsewhere_are_refused(tiny_base: Path, root: Path, name: str) -> None:
    async with backend_at(root) as backend:
        with pytest.raises(ConfigError, match=r"name="):
            await backend.fork_checkpoint(new(tiny_base, "fork"), from_model=name)
        with pytest.raises(ConfigError, match=r"project="):
            await backend.fork_checkpoint(new(tiny_base, "fork"), from_model="origin", from_project=name)
    assert sorted(p.name for p in (root / "tests" / "models").iterdir()) == ["origin"]


async def test_a_checkpoint_that_names_files_outside_is_not_taken(tiny_base: Path, root: Path) -> None:
    secret = root.parent / "secret"
    secret.write_text("key")
    manifest = checkpoint(root, "origin", 3) / "trainer_state.json"
    content = json.loads(manifest.read_text())
    content["files"]["../../../../../secret"] = {"size": 3, "sha256": ""}
    manifest.write_text(json.dumps(content))
    async with backend_at(root) as backend:
        with pytest.raises(CheckpointError, match="which is outside the folder"):
            await backend.fork_checkpoint(new(tiny_base, "fork"), from_model="origin", step=3)
    assert not list(root.rglob("secret"))


async def test_damaged_checkpoints_and_missing_models(tiny_base: Path, root: Path, tmp_path: Path) -> None:
    weights = checkpoint(root, "origin", 3) / "adapter_model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    async with backend_at(root) as backend:
        fork = new(tiny_base, "fork")
        with pytest.raises(CheckpointError, match=r"is damaged: adapter_model\.safetensors"):
            await backend.fork_checkpoint(fork, from_model="origin")
        with pytest.raises(CheckpointError, match="there is no model 'orign' of project 'tests'"):
            await backend.fork_checkpoint(fork, from_model="orign")
        with pytest.raises(CheckpointError, match="is no folder; give a PEFT adapter folder"):
            await backend.fork_checkpoint(fork, from_path=tmp_path / "nowhere")
        (tmp_path / "empty").mkdir()
        with pytest.raises(CheckpointError, match=r"has no adapter_config\.json"):
            await backend.fork_checkpoint(fork, from_path=tmp_path / "empty")
        for options, wrong in (
            ({}, "give either from_model"),
            ({"from_model": "origin", "from_path": tmp_path}, "give either from_model"),
            ({"from_path": tmp_path, "step": 1}, "steps are for from_model"),
            ({"from_model": "origin", "step": 1, "not_after_step": 2}, "either step or not_after_step"),
            ({"from_model": "origin", "step": -1}, "step=-1 must be >= 0"),
        ):
            with pytest.raises(ConfigError, match=wrong):
                await backend.fork_checkpoint(fork, **options)  # type: ignore[arg-type]
        # Nothing of these is left: the model starts anew.
        await fork.register(backend)
        assert await fork.get_step() == 0


# The LoRA must be the model's -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lora", "problem"),
    [
        (art.LoraConfig(r=8), r"42 weights have other shapes: .*lora_A\.weight is \[4, 64\], not \[8, 64\]"),
        (art.LoraConfig(r=4, alpha=8.0), "its alpha is 32.0, the model's 8"),
        (art.LoraConfig(r=4, target_modules=("q_proj", "v_proj")), r"it has 30 more \(down_proj, gate_proj, k_proj"),
        (art.LoraConfig(r=4, target_modules=("q_proj", "lm_head")), r"it lacks 2 weights \(lm_head\) and it has 36"),
    ],
)
async def test_another_lora_is_refused_and_the_fitting_one_named(
    tiny_base: Path, root: Path, lora: art.LoraConfig, problem: str
) -> None:
    async with backend_at(root) as backend:
        fork = new(tiny_base, "fork", lora=lora)
        with pytest.raises(ConfigError, match=problem) as caught:
            await backend.fork_checkpoint(fork, from_path=checkpoint(root, "origin", 3))
        offered = str(caught.value).rpartition("make the model with lora=")[2]
        fitting = eval(offered, {"art": art})
        assert await backend.fork_checkpoint(new(tiny_base, "fork", lora=fitting), from_model="origin") == 3


async def test_another_base_model_is_refused(tiny_base: Path, root: Path, tmp_path: Path) -> None:
    same = make_model("llama", tmp_path / "same")
    wider = make_model("llama", tmp_path / "wider", hidden_size=64)
    async with backend_at(root) as backend:
        with pytest.raises(ConfigError, match=r"tests/origin@3 was trained on .*tiny-llama.*give from_path="):
            await backend.fork_checkpoint(new(same, "fork"), from_model="origin")
        folder = checkpoint(root, "origin", 3)
        assert await backend.fork_checkpoint(new(same, "fork"), from_path=folder) == 0
        with pytest.raises(ConfigError, match="other shapes"):
            await backend.fork_checkpoint(new(wider, "fork2"), from_path=folder)
        with pytest.raises(ModelError, match="there is no such folder"):
            await backend.fork_checkpoint(new(tmp_path / "nowhere", "fork3"), from_path=folder)


def test_shapes_are_those_of_the_file(tiny_base: Path, root: Path) -> None:
    folder = checkpoint(root, "origin", 3)
    assert adapter_shapes(tiny_base, LORA) == read_adapter_shapes(folder)
    check_adapter(folder, tiny_base, LORA)


async def test_an_exported_adapter_is_a_folder_to_start_from(tiny_base: Path, root: Path, tmp_path: Path) -> None:
    async with backend_at(root) as backend:
        origin, fork = new(tiny_base, "origin"), new(tiny_base, "fork")
        await origin.register(backend)
        done = await origin.export(tmp_path / "out", step=2, format="adapter")
        assert await backend.fork_checkpoint(fork, from_path=done.path) == 0
        await fork.register(backend)
        assert said(fork) == said(origin, step=2)
