"""Exports: merged models and adapters that other programs load, and what cannot be exported."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import peft
import torch
import transformers
from agents import even_groups
from tiny_models import ARCHITECTURES, make_model
from tokenizers_for_tests import make_tokenizer

import artnb as art
from artnb.cli import main
from artnb.errors import CheckpointError, ConfigError, ModelError
from artnb.exported import EXPORT_FILE, Exported
from artnb.tracking.history import History
from artnb.training import merge as merge_module
from artnb.training.export import Source, export_checkpoint
from artnb.training.policy import load_policy

LORA = art.LoraConfig(r=4)
IDS = torch.tensor([[5, 90, 17, 200, 33, 61, 250, 8]])


def make_adapter(base: Path, folder: Path, lora: art.LoraConfig = LORA) -> Path:
    """An adapter that changes the base model's answers a little, as training does."""
    policy = load_policy(base, lora=lora, device="cpu", dtype="float32")
    policy.add_adapter("made")
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in policy.adapter_parameters("made").values():
            weight.copy_(torch.randn(weight.shape, generator=rng) * 0.05)
    policy.save_adapter("made", folder)
    return folder


@pytest.fixture(scope="module")
def adapter(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(tiny_base, tmp_path_factory.mktemp("adapter") / "agent")


def plain(folder: Path, adapter: Path | None = None) -> Any:
    """A folder's model as transformers and PEFT load it, in fp32."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return (model if adapter is None else peft.PeftModel.from_pretrained(model, adapter)).eval()


def logits(folder: Path, adapter: Path | None = None) -> torch.Tensor:
    with torch.no_grad():
        return plain(folder, adapter)(input_ids=IDS).logits


def made_of_probe(folder: Path) -> list[int]:
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    return list(tokenizer.apply_chat_template(merge_module.PROBE, add_generation_prompt=True, return_dict=False))


# Merged models ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_a_merged_export_answers_as_base_and_adapter_do(kind: str, tmp_path: Path) -> None:
    base = make_model(kind, tmp_path / "base")
    adapter = make_adapter(base, tmp_path / "adapter")
    done = export_checkpoint(Source(adapter, "agent", base_model=str(base)), tmp_path / "out")
    expected, got = logits(base, adapter), logits(done.path)
    assert float((expected - logits(base)).abs().max()) > 0.1, "the adapter changes something"
    assert float((got - expected).abs().max()) < 1e-4
    assert done.max_logit_difference is not None and done.max_logit_difference < 1e-4
    assert (done.dtype, done.rank, done.format) == ("float32", 4, "merged")
    assert not list(done.path.glob("adapter*")) and not list(done.path.glob(".*")), "nothing but the model"
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(done.path)
    talk = [{"role": "user", "content": "한글 👋"}]
    assert tokenizer.apply_chat_template(talk) == make_tokenizer("chatml").apply_chat_template(talk)
    # Ollama reads it here, not in chat_template.jinja.
    assert json.loads((done.path / "tokenizer_config.json").read_text())["chat_template"] == tokenizer.chat_template


def test_sixteen_bits(tiny_base: Path, adapter: Path, tmp_path: Path) -> None:
    done = export_checkpoint(Source(adapter, "agent"), tmp_path / "out", dtype="bfloat16")
    assert json.loads((done.path / "config.json").read_text())["dtype"] == "bfloat16"
    size = (done.path / "model.safetensors").stat().st_size
    assert size < 0.6 * (tiny_base / "model.safetensors").stat().st_size
    expected = logits(tiny_base, adapter)
    difference = float((logits(done.path) - expected).abs().max())
    assert 1e-4 < difference < 0.05 * float(expected.abs().max())
    # What is reported is what a program that loads the folder computes.
    assert done.max_logit_difference is not None and done.compared_in == "float32"
    probe = torch.tensor([made_of_probe(done.path)])
    loaded, reference = (plain(folder, lora) for folder, lora in ((done.path, None), (tiny_base, adapter)))
    with torch.no_grad():
        again = float((loaded(input_ids=probe).logits - reference(input_ids=probe).logits).abs().max())
    assert again == pytest.approx(done.max_logit_difference, rel=1e-3)
    # "auto" is what the base's files have.
    again = export_checkpoint(Source(adapter, "agent", base_model=str(done.path)), tmp_path / "auto")
    assert again.dtype == "bfloat16"


@pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings=True:UserWarning")  # PEFT's, when it is trained
def test_an_adapter_on_a_tied_output_head_leaves_the_embedding_alone(tmp_path: Path) -> None:
    base = make_model("llama", tmp_path / "base", tie_word_embeddings=True)
    adapter = make_adapter(base, tmp_path / "adapter", art.LoraConfig(r=4, target_modules=("q_proj", "lm_head")))
    done = export_checkpoint(Source(adapter, "agent"), tmp_path / "out")
    assert float((logits(done.path) - logits(base, adapter)).abs().max()) < 1e-4
    untouched = make_adapter(base, tmp_path / "other", art.LoraConfig(r=4, target_modules=("q_proj",)))
    tied = export_checkpoint(Source(untouched, "agent"), tmp_path / "tied")
    kept = [
        json.loads((folder / "config.json").read_text())["tie_word_embeddings"] for folder in (done.path, tied.path)
    ]
    assert kept == [False, True]


def test_a_vocabulary_that_converters_need_goes_along(tiny_base: Path, tmp_path: Path) -> None:
    base = make_model("llama", tmp_path / "base")
    (base / "tokenizer.model").write_bytes(b"sentencepiece")
    done = export_checkpoint(Source(make_adapter(base, tmp_path / "adapter"), "agent"), tmp_path / "out")
    assert (done.path / "tokenizer.model").read_bytes() == b"sentencepiece"


def test_a_quantized_base_is_refused_and_its_full_weights_are_taken(
    tiny_base: Path, adapter: Path, tmp_path: Path
) -> None:
    quantized = make_model("llama", tmp_path / "bnb-4bit")
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (quantized / "config.json").write_text(json.dumps(config))
    source = Source(adapter, "agent", base_model=str(quantized))
    with pytest.raises(ModelError, match=r"holds quantized weights \(bitsandbytes\).*base_model=<the same model in 16"):
        export_checkpoint(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    done = export_checkpoint(source, tmp_path / "out", base_model=str(tiny_base))
    assert float((logits(done.path) - logits(tiny_base, adapter)).abs().max()) < 1e-4


def test_too_little_memory_is_said_before_anything_is_loaded(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merge_module, "available_bytes", lambda device: 1000)
    with pytest.raises(ModelError, match=r"takes 0\.0 GiB of memory, 0\.0 GiB are free; .* format='adapter'"):
        export_checkpoint(Source(adapter, "agent"), tmp_path / "out")
    export_checkpoint(Source(adapter, "agent"), tmp_path / "out", format="adapter")


def test_where_memory_is_scarce_weights_are_added_in_their_own_dtype(
    tiny_base: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = sum(weight.numel() for weight in plain(tiny_base).parameters())
    monkeypatch.setattr(merge_module, "available_bytes", lambda device: 3 * weights)
    done = export_checkpoint(Source(adapter, "agent"), tmp_path / "out", dtype="bfloat16")
    assert (done.dtype, done.compared_in) == ("bfloat16", "bfloat16")
    expected = logits(tiny_base, adapter)
    assert float((logits(done.path) - expected).abs().max()) < 0.05 * float(expected.abs().max())


def test_weights_that_a_dtype_cannot_hold_are_refused(adapter: Path, tmp_path: Path) -> None:
    base = make_model("llama", tmp_path / "large")
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, 0] = 1e6
    model.save_pretrained(base)
    source = Source(adapter, "agent", base_model=str(base))
    with pytest.raises(ModelError, match="too large for float16; take dtype='bfloat16'"):
        export_checkpoint(source, tmp_path / "out", dtype="float16")
    assert export_checkpoint(source, tmp_path / "out", dtype="bfloat16").dtype == "bfloat16"


def test_a_base_that_is_not_there_or_does_not_fit(adapter: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere': there is no such folder"):
        export_checkpoint(Source(adapter, "agent", base_model=str(tmp_path / "nowhere")), tmp_path / "out")
    wider = make_model("llama", tmp_path / "wider", hidden_size=64)
    with pytest.raises(CheckpointError, match="the adapter does not fit the base model"):
        export_checkpoint(Source(adapter, "agent", base_model=str(wider)), tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["wider"]


# Adapters, and where they go --------------------------------------------------------------------


def test_an_adapter_is_exported_as_it_is(tiny_base: Path, adapter: Path, tmp_path: Path) -> None:
    done = export_checkpoint(Source(adapter, "agent", base_model=str(tiny_base)), tmp_path / "out", format="adapter")
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        assert (done.path / file).read_bytes() == (adapter / file).read_bytes()
    assert sorted(path.name for path in done.path.iterdir()) == sorted(
        ["adapter_config.json", "adapter_model.safetensors", EXPORT_FILE]
    )
    assert float((logits(tiny_base, done.path) - logits(tiny_base, adapter)).abs().max()) == 0.0


def test_files_are_readable_by_whoever_serves_them(adapter: Path, tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        done = export_checkpoint(Source(adapter, "agent"), tmp_path / "out")
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in done.path.iterdir()} == {0o644}


def test_only_an_earlier_export_is_replaced(adapter: Path, tmp_path: Path) -> None:
    source = Source(adapter, "agent")
    first = export_checkpoint(source, tmp_path / "out", format="adapter")
    again = export_checkpoint(source, tmp_path / "out")
    assert again.path == first.path and not (again.path / "adapter_config.json").exists()
    (tmp_path / "mine").mkdir()
    export_checkpoint(source, tmp_path / "mine", format="adapter")  # empty: it may be filled
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="holds other files; give a new or empty folder"):
        export_checkpoint(source, tmp_path / "other")
    with pytest.raises(ConfigError, match="is a file; give a folder"):
        export_checkpoint(source, tmp_path / "other" / "thesis.txt")
    for inside in (adapter, adapter / "x", adapter / "x" / ".." / "y"):
        with pytest.raises(ConfigError, match=r"inside the checkpoint's own folder|holds other files"):
            export_checkpoint(source, inside, format="adapter")
    assert sorted(p.name for p in adapter.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]


def test_a_full_disk_leaves_the_earlier_export(adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source(adapter, "agent")
    export_checkpoint(source, tmp_path / "out", format="adapter")

    def full(self: Any, folder: Path, **options: Any) -> None:
        (Path(folder) / "model.safetensors").write_bytes(b"x" * 100)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", full)
    with pytest.raises(CheckpointError, match=r"No space left on device; .* free on .*Nothing of it was kept"):
        export_checkpoint(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"format": "merge"}, "format='merge' is unknown; did you mean 'merged'"),
        ({"format": "gguf"}, r"convert_hf_to_gguf\.py .*/agent --outfile .*/agent\.gguf"),
        ({"dtype": "float8"}, "dtype='float8' is unknown; did you mean 'float32'"),
        ({"format": "adapter", "dtype": "float32"}, "an adapter is written as it is"),
    ],
)
def test_options_that_cannot_be_honoured(adapter: Path, tmp_path: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        export_checkpoint(Source(adapter, "agent"), tmp_path / "agent.gguf", **options)
    assert list(tmp_path.iterdir()) == []


def test_folders_that_are_no_adapter(tmp_path: Path, adapter: Path) -> None:
    with pytest.raises(CheckpointError, match="is no folder; give a PEFT adapter folder"):
        export_checkpoint(Source(tmp_path / "nowhere", "agent"), tmp_path / "out")
    broken = tmp_path / "broken"
    broken.mkdir()
    config = json.loads((adapter / "adapter_config.json").read_text())
    (broken / "adapter_config.json").write_text(json.dumps(config))
    (broken / "adapter_model.bin").write_bytes(b"\x80\x02")
    with pytest.raises(CheckpointError, match=r"has no adapter_model\.safetensors \(adapter_model\.bin is a pickle"):
        export_checkpoint(Source(broken, "agent"), tmp_path / "out")
    (broken / "adapter_model.safetensors").write_bytes(b"\x10")
    (broken / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))
    with pytest.raises(CheckpointError, match="was made with use_dora=True, which artnb's LoRA does not have"):
        export_checkpoint(Source(broken, "agent"), tmp_path / "out")
    (broken / "adapter_config.json").write_text(json.dumps({"peft_type": "IA3"}))
    with pytest.raises(CheckpointError, match="is a IA3 adapter; only LoRA"):
        export_checkpoint(Source(broken, "agent"), tmp_path / "out")


# The lines that serve it ------------------------------------------------------------------------


def test_serve_lines_are_one_shell_word_each() -> None:
    path, base = Path("/data/my exports/한글's"), "Qwen/Qwen2.5-0.5B-Instruct"
    merged = Exported(path, "merged", "Agent 001", 3, base, 12, "bfloat16", 0.01, "float32")
    assert shlex.split(merged.vllm) == ["vllm", "serve", str(path), "--served-model-name", "Agent 001"]
    assert shlex.split(merged.ollama) == (
        ["ollama", "create", "agent-001", "-f", f"{path}/Modelfile", "&&", "ollama", "run", "agent-001"]
    )
    assert shlex.split(merged.gguf)[-3:] == [str(path), "--outfile", f"{path}.gguf"]
    assert all(
        line in str(merged) for line in (merged.vllm, merged.ollama, merged.gguf, "0.01, both computed in float32")
    )
    adapter = Exported(path, "adapter", "a'b", None, base, 12)
    lora = ["--enable-lora", "--max-lora-rank", "16", "--lora-modules", f"a'b={path}"]
    assert shlex.split(adapter.vllm) == ["vllm", "serve", base, *lora]
    for line in ("ollama", "gguf"):
        with pytest.raises(ConfigError, match='format="merged"'):
            getattr(adapter, line)
    assert str(adapter).endswith(adapter.vllm)
    assert Exported(path, "merged", "모델", 3, base, 8).ollama_name == "artnb-model"


def test_files_alone_need_no_torch() -> None:
    """A client with the core install exports adapters, and prepares SFT runs."""
    heavy = "torch transformers peft safetensors huggingface_hub datasets"
    code = (
        "import sys, artnb.utils.sft, artnb.hub, artnb.exported, artnb.training.export\n"
        f"print([name for name in {heavy!r}.split() if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"


# As a user does it ------------------------------------------------------------------------------


async def test_a_model_exports_any_of_its_steps_with_and_without_a_backend(
    tiny_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def handle() -> art.TrainableModel:
        return art.TrainableModel("agent", "tests", tiny_base, lora=LORA, base_path=tmp_path / "art")

    model = handle()
    with pytest.raises(CheckpointError, match="agent is not registered, and there is no checkpoint in"):
        await model.export(tmp_path / "out")
    async with art.LocalBackend(path=tmp_path / "art", device="cpu", dtype="float32", verbose=False) as backend:
        await model.register(backend)
        for step in range(2):
            await model.train(await even_groups(model, step), art.TrainConfig(learning_rate=1e-2))
        newest = await model.export(tmp_path / "newest")
        first = await model.export(tmp_path / "first", step=1)
        checkpoints = tmp_path / "art" / "tests" / "models" / "agent" / "checkpoints"
        for done, step in ((newest, 2), (first, 1)):
            assert done.step == step
            expected = logits(tiny_base, checkpoints / f"{step:04d}")
            assert float((logits(done.path) - expected).abs().max()) < 1e-4
        # The merged model says what the adapter that is served says.
        asked = [{"role": "user", "content": "hello"}]
        said = model.chat(asked, temperature=0, max_tokens=12, extra_body={"ignore_eos": True}).choices[0]
        merged: Any = transformers.AutoModelForCausalLM.from_pretrained(newest.path, dtype=torch.float32)
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(newest.path)
        ids = torch.tensor([tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)])
        greedy = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        made = merged.generate(ids, attention_mask=torch.ones_like(ids), **greedy)
        assert made[0, ids.shape[1] :].tolist() == said.model_extra["token_ids"]
        with pytest.raises(CheckpointError, match="there is no checkpoint 7"):
            await model.export(tmp_path / "x", step=7)
        with pytest.raises(ConfigError, match=r"must be a whole number from 0, not '\.\./2'"):
            await model.export(tmp_path / "x", step="../2")  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"inside the checkpoint's own folder"):
            await model.export(checkpoints / "0002" / ".." / "0003", format="adapter")
        assert await model.checkpoints() == [0, 1, 2]
    offline = await handle().export(tmp_path / "offline", step=1, format="adapter")
    assert (offline.step, offline.base_model) == (1, str(tiny_base))

    capsys.readouterr()
    folder = tmp_path / "art" / "tests" / "models" / "agent"
    assert main(["export", str(folder), str(tmp_path / "cli"), "--dtype", "bfloat16"]) == 0
    shown = capsys.readouterr().out
    assert re.match(r"agent@2 as a merged bfloat16 model in .*/cli\n", shown) and "\nvllm serve " in shown
    assert main(["export", str(tmp_path / "offline"), str(tmp_path / "cli2"), "--format", "adapter"]) == 0
    for wrong, said in (
        (["export", str(tmp_path), str(tmp_path / "x")], "holds neither checkpoints nor a PEFT adapter"),
        (["export", str(folder), str(tmp_path / "x"), "--step", "9"], "there is no checkpoint 9"),
        (["export", str(tmp_path / "offline"), str(tmp_path / "x"), "--step", "1"], "--step is for a model's folder"),
        (["export", str(folder), str(tmp_path / "x"), "--format", "ggu"], "format='ggu' is unknown"),
    ):
        assert main(wrong) == 1
        assert said in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


async def test_a_backend_without_files_says_so(tiny_base: Path, tmp_path: Path) -> None:
    class Elsewhere:
        async def register(self, model: art.TrainableModel) -> None: ...

        def history(self, model: art.TrainableModel) -> History:
            return History(tmp_path)

    model = art.TrainableModel("agent", "tests", tiny_base)
    await model.register(Elsewhere())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="Elsewhere does not give out the files of checkpoints"):
        await model.export(tmp_path / "out")


def test_what_was_trained_over_a_quantized_base_says_so(tiny_base: Path, adapter: Path, tmp_path: Path) -> None:
    from artnb.training.checkpoints import CheckpointStore

    def write(folder: Path) -> None:
        for file in adapter.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())

    checkpoint = CheckpointStore(tmp_path / "agent").save(
        3, write, {"base_model": str(tiny_base), "quantized": "4-bit"}
    )
    done = export_checkpoint(Source(checkpoint, "agent"), tmp_path / "out")
    assert (
        done.step == 3 and "trained over a base model in 4-bit" in done.notes[0] and "note: trained over" in str(done)
    )


@pytest.mark.model
def test_the_small_models_merged_export_answers_as_its_adapter_does(tmp_path: Path) -> None:
    base = art.demo_model()
    adapter = make_adapter(base, tmp_path / "adapter", art.LoraConfig(r=8))
    done = export_checkpoint(Source(adapter, "agent"), tmp_path / "out", dtype="float32")
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(done.path)
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    ids = torch.tensor([tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)])
    said = []
    found = []
    for folder, lora in ((base, adapter), (done.path, None)):
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        model = model if lora is None else peft.PeftModel.from_pretrained(model, lora)
        with torch.no_grad():
            found.append(model.eval()(input_ids=ids).logits)
        made = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False, pad_token_id=2
        )
        said.append(tokenizer.decode(made[0, ids.shape[1] :]))
    difference, largest = float((found[1] - found[0]).abs().max()), float(found[0].abs().max())
    print(f"largest difference of a logit: {difference:.2e} of logits up to {largest:.1f}; answer: {said[1]!r}")
    assert difference < 1e-3 and said[0] == said[1]
