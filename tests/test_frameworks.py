"""Agents of other frameworks through the endpoint, on the real libraries; and the documentation's page about them."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("langchain_openai")

import asyncio

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI
from langgraph_agents import TWO_TURNS_SAID, assert_trained_once, shape
from run_page import python_blocks
from scripted_backend import scripted_model

import artnb as art
from artnb.langgraph import init_chat_model

ROOT = Path(__file__).parent.parent
RECORDED = ["system:S", *TWO_TURNS_SAID]


def needs(distribution: str) -> None:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{distribution} is not installed")


def session(*command: str, cwd: Path | None = None, **environment: str) -> str:
    """What a fresh Python prints; these tests' own folder is not on its path."""
    env = {**os.environ, **environment}
    done = subprocess.run([sys.executable, "-P", *command], capture_output=True, text=True, env=env, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("where", ["in process", "over HTTP"])
async def test_a_chain_of_plain_langchain(where: str) -> None:
    model, endpoint = await scripted_model(["blue", "red", "green"], chunk_size=2)
    if where == "in process":
        llm: ChatOpenAI = init_chat_model(model, temperature=0.4)
    else:
        url = await asyncio.to_thread(lambda: model.inference_base_url)
        llm = ChatOpenAI(
            base_url=url, api_key=model.inference_api_key, model=model.get_inference_name(), temperature=0.4
        )
    prompt = ChatPromptTemplate.from_messages([("system", "One word."), ("user", "The colour of {thing}?")])
    chain = prompt | llm | StrOutputParser()
    async with art.trajectory() as t:
        said = [await chain.ainvoke({"thing": "sky"})]
        said.append(await asyncio.to_thread(chain.invoke, {"thing": "blood"}))
        said.append("".join([piece async for piece in chain.astream({"thing": "grass"})]))
        t.reward = 1.0
    await model.backend().close()
    assert said == ["blue", "red", "green"]
    assert [shape(items)[-1] for items, _ in t.histories()] == ["choice:blue0", "choice:red0", "choice:green0"]
    assert {request.sampling.temperature for request in endpoint.engine.requests} == {0.4}
    assert_trained_once(t, endpoint)


def test_an_agent_of_the_openai_agents_sdk_and_its_tracing_stays_here() -> None:
    needs("openai-agents")
    said = json.loads(session(str(ROOT / "tests" / "openai_agents_session.py"), "traced", OPENAI_API_KEY="sk-none"))
    for how in ("whole", "streamed"):
        assert said[how]["output"] == "it is 3, É" and said[how]["shape"] == RECORDED
        assert said[how]["samplings"] == [[0.3, 200]] * 2
    assert said["looked for"] == []
    assert "api.openai.com" in said["looked for when traced"], "else the line above shows nothing"


def test_litellm_in_process_and_over_http() -> None:
    needs("litellm")
    said = json.loads(session(str(ROOT / "tests" / "litellm_session.py")).splitlines()[-1])
    assert said.pop("looked for") == []
    assert said.pop("synchronous")["shape"] == ["user:x", "choice:hi0"]
    assert len(said) == 4
    for way in said.values():
        assert way["output"] == "it is 3, É" and way["shape"] == RECORDED
        assert way["samplings"] == [[0.3, 200]] * 2


# The documentation -------------------------------------------------------------------------------------------


def test_the_page_runs_as_a_notebook(tiny_base: Path, tmp_path: Path) -> None:
    """user-reports #75: the real libraries, engine and training; a tiny random model in place of the demo model."""
    script, page = ROOT / "tests" / "run_page.py", ROOT / "docs" / "frameworks.md"
    said = session(str(script), str(page), str(tiny_base), cwd=tmp_path, LITELLM_LOCAL_MODEL_COST_MAP="True")
    assert f"{len(python_blocks(page))} blocks of frameworks.md ran" in said


def test_every_page_with_code_is_run_by_a_test() -> None:
    """user-reports #75."""
    tests = {path: path.read_text(encoding="utf-8") for path in (ROOT / "tests").glob("test_*.py")}
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        if python_blocks(page):
            assert any(page.name in text for text in tests.values()), f"no test runs the Python blocks of {page.name}"
