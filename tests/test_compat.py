"""`import art` gives artnb when asked, and code that was written for ART runs on it."""

from __future__ import annotations

import asyncio
import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import openai
import pydantic
import pytest
from art_clients import noughts
from endpoint_for_tests import HELLO, Endpoint
from openai.types.chat.chat_completion import Choice
from training_service import make_backend, running

import artnb
import artnb.compat
from artnb.errors import CheckpointError, ConfigError, RolloutError

CLIENTS = Path(__file__).parent / "art_clients"
PATHS = (
    *("art.local", "art.local.backend", "art.serverless", "art.serverless.backend", "art.trajectories", "art.types"),
    *("art.model", "art.gather", "art.batches", "art.dev", "art.errors", "art.utils", "art.utils.iterate_dataset"),
    *(
        "art.utils.retry",
        "art.utils.strip_logprobs",
        "art.utils.litellm",
        "art.utils.sft",
        "art.rewards",
        "art.langgraph",
    ),
)


@pytest.fixture
def art() -> Iterator[ModuleType]:
    yield artnb.compat.install()
    artnb.compat.uninstall()
    assert not [name for name in sys.modules if name == "art" or name.startswith("art.")]


# The name -----------------------------------------------------------------------------------------


def test_nothing_answers_to_art_unless_asked() -> None:
    assert not artnb.compat.installed() and "art" not in sys.modules
    with pytest.raises(ModuleNotFoundError, match="No module named 'art'"):
        importlib.import_module("art")


def test_art_is_artnb_and_not_a_copy(art: ModuleType) -> None:
    assert art is artnb is artnb.compat.install() and artnb.compat.installed()
    for path in PATHS:
        module = importlib.import_module(path)
        ours = importlib.import_module(f"artnb{path.removeprefix('art')}")
        assert module is ours and module.__name__ == ours.__name__
        assert module.__spec__ is not None and module.__spec__.name == module.__name__
        assert hasattr(module, "__path__") == (module.__spec__.submodule_search_locations is not None)
    from art.trajectories import Trajectory  # type: ignore[import-not-found]
    from art.utils import iterate_dataset, limit_concurrency  # type: ignore[import-not-found]

    assert Trajectory is artnb.Trajectory
    assert callable(iterate_dataset) and callable(limit_concurrency)  # not the modules of these names


def test_a_module_that_artnb_has_not(art: ModuleType) -> None:
    with pytest.raises(ModuleNotFoundError, match=r"art\.megatron is a module of ART .* one machine trains") as raised:
        importlib.import_module("art.megatron")
    assert raised.value.name == "art.megatron"
    with pytest.raises(ModuleNotFoundError, match=r"art\.nowhere is a module of ART that artnb has not$"):
        importlib.import_module("art.nowhere")
    with pytest.raises(ImportError, match="cannot import name 'SkyPilotBackend'"):
        exec("from art import SkyPilotBackend")


def test_an_art_that_is_imported_already_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "art.py").write_text("REAL = True\n")
    program = (
        "import art, artnb.compat, artnb.errors\n"
        "try:\n    artnb.compat.install()\n"
        "except artnb.errors.ConfigError as error:\n    print(error)\n"
        "assert art.REAL and not artnb.compat.installed()\n"
    )
    environment = {"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin"}
    out = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert f"art is imported already, from {tmp_path / 'art.py'}" in out.stdout and "in a fresh kernel" in out.stdout
    later = "import artnb.compat; artnb.compat.install(); import art; print(art.__name__)"
    out = subprocess.run([sys.executable, "-c", later], env=environment, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "artnb"  # asked for, it comes before one that is only installed


def test_the_name_loads_nothing_heavy() -> None:
    program = (
        "import artnb.compat, sys; artnb.compat.install()\n"
        "import art, art.local, art.types, art.dev, art.utils\n"
        "art.TrainableModel(name='a', project='p', base_model='b')\n"
        "print([m for m in ('torch', 'transformers', 'litellm', 'wandb', 'langchain_core') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "[]\n"


# Whole programs -----------------------------------------------------------------------------------


def run_client(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "artnb.compat", *arguments], capture_output=True, text=True, timeout=200
    )


@pytest.mark.slow
def test_a_script_that_imports_art_trains(tiny_base: Path, tmp_path: Path) -> None:
    done = run_client(str(CLIENTS / "sliding_row.py"), str(tiny_base), str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "step 2, rank 4, context 256" in done.stdout and "answers as agent-001@2" in done.stdout
    assert "_internal_config: not needed here: fast_inference" in done.stdout
    assert "logprob_calculation_chunk_size is not needed here: log-probs are computed in chunks" in done.stdout
    folder = tmp_path / "sliding-row" / "models" / "agent-001"
    assert (folder / "checkpoints" / "0002" / "adapter_config.json").exists()  # where ART's users look for it
    metrics = [json.loads(line) for line in (folder / "history" / "metrics.jsonl").read_text().splitlines()]
    assert {record["step"] for record in metrics} == {1, 2}


def test_what_a_script_raises_is_its_own(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("import sys, art\nimport helper\nprint(sys.argv[1:], helper.HERE)\nraise KeyError('mine')\n")
    (tmp_path / "helper.py").write_text("HERE = 'beside the script'\n")
    done = run_client(str(script), "--steps", "3")
    assert done.returncode == 1 and "KeyError: 'mine'" in done.stderr
    assert "['--steps', '3'] beside the script" in done.stdout
    assert "usage: python -m artnb.compat SCRIPT" in run_client().stderr


async def test_notebook_code_on_the_embedded_engine(art: Any, tiny_base: Path, tmp_path: Path) -> None:
    backend = art.local.LocalBackend(path=tmp_path, device="cpu", verbose=False)
    model = art.TrainableModel(
        name="noughts", project="p", base_model=tiny_base, base_path=tmp_path, lora_config=art.LoRAConfig(rank=4)
    )
    async with backend:
        results = await noughts.main(art, model, backend)
    assert [r.step for r in results] == [1, 2] and all(r.trained for r in results)
    history = model.history()
    assert history["step"].tolist() == [1, 2] and history["val/reward"].notna().all()
    assert model.read_state() == {"dataset": {"step": 1}, "last": 2}
    kept = model.trajectories(step=2, split="train")
    assert len(kept) == 6 and kept["logs"].str[0].str.startswith("answered").all()


async def test_the_same_code_at_the_service(art: Any, tmp_path: Path) -> None:
    with running() as service:
        service.answer = "a1"
        backend = make_backend(service)
        assert isinstance(backend, art.ServerlessBackend)
        model = art.TrainableModel(
            name="noughts", run_name="noughts", project="p", base_model="some/base", base_path=tmp_path
        )
        async with backend:
            results = await noughts.main(art, model, backend)
        assert [r.step for r in results] == [1, 2]
        assert [r.artifact_name for r in results] == ["team/p/noughts:step1", "team/p/noughts:step2"]
        config = service.sent("POST", "/training-jobs")[0]["experimental_config"]
        assert config == {"learning_rate": 1e-3, "normalize_advantages": True}


# Single names -------------------------------------------------------------------------------------


async def test_a_model_that_is_only_asked(tmp_path: Path) -> None:
    model = artnb.Model(
        name="o4", project="p", inference_model_name="o4-mini", inference_api_key="k", inference_base_url="http://x/v1"
    )
    assert model.inference_model_name == "o4-mini" and model.get_inference_name(3) == "o4-mini@3"
    with pytest.raises(ConfigError, match="o4 is not registered"):
        model.backend()

    class Backend:
        path = tmp_path

    model.register(Backend())  # type: ignore[arg-type]
    await model.register(backend := Backend())  # type: ignore[arg-type, func-returns-value]
    assert model.backend() is backend and model.folder == tmp_path / "p" / "models" / "o4"
    await model.log([artnb.Trajectory(reward=0.5)], split="val")
    assert model.history()["val/reward"].tolist() == [0.5]
    assert model.litellm_completion_params() == {
        "model": "o4-mini",
        "base_url": "http://x/v1",
        "api_key": "k",
        "temperature": 1,
    }


def test_state_is_kept_beside_the_history(tmp_path: Path) -> None:
    model = artnb.Model(name="m", project="p", base_path=tmp_path)
    assert model.read_state() is None
    model.overwrite_state({"offset": 5, "nested": {"a": 1, "b": 2}})
    assert model.merge_state({"nested": {"b": 3}, "offset": [1]}) == {"offset": [1], "nested": {"a": 1, "b": 3}}
    assert artnb.Model(name="m", project="p", base_path=tmp_path).read_state() == model.read_state()
    with pytest.raises(ConfigError, match="kept as JSON"):
        model.overwrite_state({"when": object()})
    with pytest.raises(ConfigError, match="kept as JSON"):
        model.overwrite_state({"nan": float("nan")})
    assert model.read_state() == {"offset": [1], "nested": {"a": 1, "b": 3}}
    for text in ("{torn", "[1]"):
        (model.folder / "state.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"state\.json"):
            model.read_state()


async def test_captured_yielded_and_hidden() -> None:
    endpoint = Endpoint("left")

    async def play(reward: float) -> None:
        await endpoint.ask()
        with artnb.no_capture():
            assert artnb.current_trajectory() is None
            await endpoint.ask([{"role": "user", "content": "a judge is asked"}])
        artnb.current_trajectory(require=True).reward = reward

    captured = await artnb.trajectory(play(0.5))  # type: ignore[misc]
    assert captured.reward == 0.5 and len(captured.choices()) == 1 and captured.additional_histories == []
    with pytest.raises(RolloutError, match="no trajectory is recorded here"):
        artnb.current_trajectory(require=True)

    async def give(trajectory: artnb.Trajectory | None) -> None:
        if trajectory is not None:
            artnb.yield_trajectory(trajectory)

    assert await artnb.capture_yielded_trajectory(give(captured)) is captured
    with pytest.raises(RolloutError, match="yielded no trajectory"):
        await artnb.capture_yielded_trajectory(give(None))
    with pytest.raises(RolloutError, match="inside of a coroutine given to capture_yielded_trajectory"):
        artnb.yield_trajectory(captured)
    assert endpoint.resolver.names() == ["base"] and HELLO


async def test_trajectory_group_may_record_what_fails() -> None:
    async def go(reward: float) -> artnb.Trajectory:
        if reward < 0:
            raise ValueError("lost")
        return artnb.Trajectory(reward=reward)

    group = await artnb.trajectory_group((go(r) for r in (1.0, -1.0, 0.0)), metadata={"a": 1}, return_exceptions=True)
    assert [t.reward for t in group] == [1.0, 0.0] and group.exceptions[0].message == "lost"
    assert group.metadata == {"a": 1}
    with pytest.raises(RolloutError, match="1 of 2 rollouts failed") as raised:
        await artnb.trajectory_group([go(1.0), go(-1.0)])
    assert str(raised.value.__cause__) == "lost"
    groups = await artnb.gather_trajectory_groups(
        (artnb.trajectory_group([go(1.0), go(r)]) for r in (0.5, -1.0)), max_exceptions=1, pbar_desc=None
    )
    assert [len(g) for g in groups] == [2, 1]


def test_the_utils(tmp_path: Path) -> None:
    from artnb.utils import format_message, get_model_step
    from artnb.utils.strip_logprobs import strip_logprobs

    call = {"function": {"name": "look", "arguments": '{"x": 1}'}}
    assert (
        format_message({"role": "assistant", "content": "Hm.", "tool_calls": [call]})
        == 'Assistant:\nHm.\nlook({"x": 1})'
    )
    assert format_message({"role": "user", "content": None}) == "User:"
    assert get_model_step(artnb.Model(name="m", project="p"), tmp_path) == 0

    choice = Choice.model_validate(
        {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": "a"},
            "logprobs": {"content": []},
        }
    )
    traj = artnb.Trajectory(messages_and_choices=[{"role": "user", "content": "q"}, choice], reward=1)
    stripped = strip_logprobs({"t": traj, "pair": (1, {"logprobs": 2, "kept": 3})})
    assert stripped["t"].choices()[0].logprobs is None and stripped["pair"] == (1, {"kept": 3})
    assert traj.choices()[0].logprobs is not None


def test_limits_under_successive_loops() -> None:
    from artnb.utils.limit_concurrency import limit_concurrency

    running_now = most = 0

    @limit_concurrency(2, derive_key=lambda key: key)
    async def work(key: str) -> None:
        nonlocal running_now, most
        running_now += 1
        most = max(most, running_now)
        await asyncio.sleep(0)
        running_now -= 1

    async def all_of(*keys: str) -> None:
        await asyncio.gather(*map(work, keys))

    asyncio.run(all_of("a", "a", "a", "a"))
    assert most == 2
    asyncio.run(all_of("a", "a", "a", "b", "b", "b"))
    assert most == 4


@pytest.mark.filterwarnings("ignore:.*`ReadOnly` qualifier:UserWarning")  # pydantic's, about LiteLLM's types
def test_a_litellm_choice_can_be_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would fetch a list of prices
    pytest.importorskip("litellm", exc_type=ImportError)
    from litellm.types.utils import Choices  # its own types; nothing is asked

    from artnb.training.rows import Sampled, sampled_tokens
    from artnb.utils.litellm import convert_litellm_choice_to_openai

    entry = {"token": "a", "logprob": -0.5, "bytes": None, "top_logprobs": []}
    theirs = Choices(
        index=0,
        finish_reason="tool_calls",
        message={
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        logprobs={"content": [entry]},
        provider_specific_fields={"prompt_token_ids": [5, 6], "token_ids": [7], "temperature": 0.5},
    )
    ours = convert_litellm_choice_to_openai(theirs)
    assert sampled_tokens(ours) == Sampled([5, 6], [7], [-0.5], 0.5)
    (call,) = ours.message.tool_calls or ()
    assert call.id == "1" and ours.message.content is None


async def test_token_ids_may_be_asked_for() -> None:
    choice = await Endpoint("left").ask(extra_body={"return_token_ids": True})
    assert choice.model_extra and choice.model_extra["token_ids"]
    with pytest.raises(openai.BadRequestError, match="return_tokens_as_token_ids"):
        await Endpoint("left").ask(extra_body={"return_tokens_as_token_ids": True})


def test_annotations_with_a_config_are_for_readers() -> None:
    class Config(pydantic.BaseModel):
        turns: int = 3

    def rollout(model: artnb.Model[Config], trained: artnb.TrainableModel[Config]) -> None: ...  # type: ignore[type-arg]

    model = artnb.Model[Config](name="m", project="p", config=Config())  # type: ignore[misc]
    assert isinstance(model, artnb.Model) and model.config.turns == 3 and rollout.__annotations__
