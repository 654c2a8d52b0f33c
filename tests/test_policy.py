import json
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
import transformers
from tiny_models import branching_rows, make_model, make_row

from artnb.config import LoraConfig
from artnb.errors import CheckpointError, ConfigError, ModelError
from artnb.training import base_model, logprobs
from artnb.training.base_model import cuda_dtype, pick_device, pick_dtype
from artnb.training.pack import build_packs
from artnb.training.policy import Policy, load_policy

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def policy(folder: Path) -> Policy:
    return load_policy(folder, lora=LoraConfig(r=4), device="cpu", dtype="float32")


def stir(policy: Policy, name: str, seed: int) -> None:
    """Make an adapter differ from the base."""
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in policy.adapter_parameters(name).values():
            weight.add_(torch.randn(weight.shape, generator=rng) * 0.05)


def logits(policy: Policy) -> torch.Tensor:
    with torch.no_grad():
        return policy.base(input_ids=torch.arange(12)[None], use_cache=False).logits


def test_describes_the_model(policy: Policy, folder: Path) -> None:
    assert policy.name == str(folder)
    assert (policy.device, policy.dtype, policy.context_length) == (CPU, torch.float32, 512)
    assert policy.tokenizer.eos_token_id in policy.eos_token_ids
    assert load_policy(folder, lora=LoraConfig(), device="cpu", context_length=100).context_length == 100
    assert load_policy(folder, lora=LoraConfig(), device="cpu", context_length=10**6).context_length == 512


def test_adapters_by_name(policy: Policy) -> None:
    assert policy.adapters() == []
    base = logits(policy)
    policy.add_adapter("qwen-2.5 agent")  # PEFT's own names cannot hold a dot
    policy.add_adapter("lora", LoraConfig(r=2, seed=3))  # nor this one
    assert policy.adapters() == ["qwen-2.5 agent", "lora"]
    with policy.using("lora"):
        torch.testing.assert_close(logits(policy), base, rtol=0, atol=0)  # B = 0: nothing changes yet
    stir(policy, "lora", 1)
    with policy.using("lora"):
        changed = logits(policy)
        with policy.without_adapter():
            torch.testing.assert_close(logits(policy), base, rtol=0, atol=0)
        with policy.using("qwen-2.5 agent"):
            torch.testing.assert_close(logits(policy), base, rtol=0, atol=0)
        torch.testing.assert_close(logits(policy), changed, rtol=0, atol=0)
    assert float((changed - base).abs().max()) > 0.1
    policy.drop_adapter("lora")
    policy.drop_adapter("lora")
    assert policy.adapters() == ["qwen-2.5 agent"]
    with policy.using("qwen-2.5 agent"):
        torch.testing.assert_close(logits(policy), base, rtol=0, atol=0)
    with pytest.raises(ModelError, match=r"no adapter 'qwen-2.5 agnet'.*did you mean 'qwen-2.5 agent'"):
        policy.using("qwen-2.5 agnet").__enter__()
    with pytest.raises(ModelError, match="already loaded"):
        policy.add_adapter("qwen-2.5 agent")


def test_the_start_of_an_adapter_depends_on_its_seed_only(policy: Policy) -> None:
    state = torch.get_rng_state()
    policy.add_adapter("a", LoraConfig(r=4, seed=7))
    assert torch.equal(torch.get_rng_state(), state)
    torch.randn(10)
    policy.add_adapter("b", LoraConfig(r=4, seed=7))
    policy.add_adapter("c", LoraConfig(r=4, seed=8))
    a, b, c = (torch.cat([w.flatten() for w in policy.adapter_parameters(n).values()]) for n in "abc")
    assert torch.equal(a, b) and not torch.equal(a, c)
    assert a.dtype == torch.float32


def trained(policy: Policy) -> set[str]:
    return {n for n, p in policy.model.named_parameters() if p.requires_grad}


def test_only_the_trained_adapter_requires_gradients(policy: Policy) -> None:
    policy.add_adapter("a")
    policy.add_adapter("b")
    assert trained(policy) == set()
    with policy.using("a", train=True):
        assert trained(policy) == set(policy.adapter_parameters("a"))
        with policy.without_adapter():
            assert trained(policy) == set()
        with policy.using("b"):
            assert trained(policy) == set()
        assert trained(policy) == set(policy.adapter_parameters("a"))
    assert trained(policy) == set()


def test_a_block_holds_the_lock(policy: Policy) -> None:
    got = []
    with policy.without_adapter():
        thread = threading.Thread(target=lambda: got.append(policy.lock.acquire(timeout=0.05)))
        thread.start()
        thread.join()
    assert got == [False]


def test_a_saved_adapter_loads_in_plain_peft(policy: Policy, folder: Path, tmp_path: Path) -> None:
    policy.add_adapter("a.b")
    stir(policy, "a.b", 1)
    policy.save_adapter("a.b", tmp_path / "adapter")
    assert sorted(os.listdir(tmp_path / "adapter")) == ["adapter_config.json", "adapter_model.safetensors"]
    assert json.loads((tmp_path / "adapter/adapter_config.json").read_text())["base_model_name_or_path"] == str(folder)
    with policy.using("a.b"):
        ours = logits(policy)
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    plain.__class__.is_gradient_checkpointing = property(lambda self: False)  # warns under transformers 5.24
    theirs = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter")
    with torch.no_grad():
        torch.testing.assert_close(theirs(input_ids=torch.arange(12)[None]).logits, ours, rtol=1e-5, atol=1e-5)

    policy.load_adapter("again", tmp_path / "adapter")
    with policy.using("again"):
        torch.testing.assert_close(logits(policy), ours, rtol=0, atol=0)
    held = policy.adapter_parameters("again")
    stir(policy, "again", 2)
    policy.load_adapter("again", tmp_path / "adapter")  # into the same tensors, which an optimizer may hold
    assert all(held[n] is p for n, p in policy.adapter_parameters("again").items())
    with policy.using("again"):
        torch.testing.assert_close(logits(policy), ours, rtol=0, atol=0)
    policy.add_adapter("small", LoraConfig(r=2))
    policy.load_adapter("small", tmp_path / "adapter")  # another rank: replaced
    with policy.using("small"):
        torch.testing.assert_close(logits(policy), ours, rtol=0, atol=0)


def test_refuses_folders_that_are_no_adapter_of_this_base(policy: Policy, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no adapter_config"):
        policy.load_adapter("a", tmp_path)
    policy.add_adapter("a")
    policy.save_adapter("a", tmp_path / "half")
    whole = (tmp_path / "half/adapter_model.safetensors").read_bytes()
    (tmp_path / "half/adapter_model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="cannot be read"):
        policy.load_adapter("b", tmp_path / "half")
    wide = make_model("llama", tmp_path / "wide", hidden_size=64)
    other = load_policy(wide, lora=LoraConfig(r=4), device="cpu", dtype="float32")
    other.add_adapter("x")
    other.save_adapter("x", tmp_path / "foreign")
    with pytest.raises(CheckpointError, match="does not fit"):
        policy.load_adapter("b", tmp_path / "foreign")
    assert policy.adapters() == ["a"]


def test_unknown_models_say_what_to_do(tmp_path: Path, folder: Path) -> None:
    lora = LoraConfig()
    with pytest.raises(ModelError, match="there is no such folder"):
        load_policy(tmp_path / "nothing", lora=lora, device="cpu")
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ModelError, match=r"has no config.json \(it holds notes.txt\)"):
        load_policy(str(tmp_path), lora=lora, device="cpu")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="does not load as a causal language model"):
        load_policy(tmp_path, lora=lora, device="cpu")
    half = shutil.copytree(folder, tmp_path / "half")
    whole = (half / "model.safetensors").read_bytes()
    (half / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match="does not load as a causal language model"):
        load_policy(half, lora=lora, device="cpu")
    with pytest.raises(ConfigError, match="target_modules"):
        load_policy(folder, lora=LoraConfig(target_modules=("nope",)), device="cpu")


def test_an_unknown_hub_id_names_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(name: str) -> None:
        raise OSError(f"We couldn't connect to the hub to load {name}\nmore")

    monkeypatch.setattr(base_model.AutoConfig, "from_pretrained", unreachable)
    with pytest.raises(ModelError, match="'nobody/nothing': no folder of that name here, and the Hugging Face hub"):
        load_policy("nobody/nothing", lora=LoraConfig(), device="cpu")


def test_device_and_dtype_are_chosen_by_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cuda_dtype((7, 5)) == torch.float16
    assert cuda_dtype((8, 0)) == cuda_dtype((9, 0)) == torch.bfloat16
    for native, expected in ((False, torch.float32), (True, torch.bfloat16)):
        monkeypatch.setattr(base_model, "_cpu_has_bf16", lambda native=native: native)
        assert pick_dtype(CPU) == expected
    assert pick_dtype(CPU, "bfloat16") == torch.bfloat16
    with pytest.raises(ConfigError, match="did you mean 'bfloat16'"):
        pick_dtype(CPU, "bfloat")
    with pytest.raises(ConfigError, match="'gpu' is unknown"):
        pick_device("gpu")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="has none"):
            pick_device("cuda")


def test_every_layer_is_recomputed_where_memory_is_short(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    from artnb.training import policy as module

    monkeypatch.setattr(module, "available_bytes", lambda device: 0)
    assert policy.recomputed_layers(1000) == 3
    monkeypatch.setattr(module, "available_bytes", lambda device: 10**12)
    assert policy.recomputed_layers(1000) == 0
    assert policy.recomputed_layers(10**9) == 3
    monkeypatch.setattr(module, "available_bytes", lambda device: 1 << 26)
    budget = policy.activation_budget()
    small, *_, large = policy.pack_sizes(budget)
    assert policy.recomputed_layers(small) == 0 and small < large
    assert policy.pass_cost(small, budget) == small and policy.pass_cost(10**9, budget) > 1.3 * 10**9
    assert policy.pack_sizes(0) == [1024]
    assert policy.pack_sizes(1 << 40) == [32768]
    per_token = policy._input_bytes() + policy._layer_bytes()
    sizes = policy.pack_sizes(20_000 * per_token)
    assert sizes[-1] == 16384 and sizes[1] <= 1.5 * sizes[0] and sorted(set(sizes)) == sizes
    with pytest.raises(ConfigError, match="gradient_checkpointing"):
        Policy.__init__(policy, None, LoraConfig(), gradient_checkpointing="automatic")  # type: ignore[arg-type]


def test_a_gpu_pass_takes_what_padded_rows_would_or_its_share(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from artnb.training import policy as module

    gib = 2**30
    monkeypatch.setattr(module, "available_bytes", lambda device: 100 * gib)
    frugal = load_policy(folder, lora=LoraConfig(r=4), device="cpu")
    frugal.device = torch.device("cuda")  # nothing is computed here
    token = frugal._input_bytes() + frugal._plain_layer_bytes()
    assert frugal.activation_budget() == gib
    assert frugal.activation_budget(2 * gib // token) == pytest.approx(2 * gib, rel=0.01)
    assert frugal.activation_budget(200 * gib // token) == 60 * gib
    frugal._spare_share = 0.25
    assert frugal.activation_budget() == 25 * gib
    frugal._activation_bytes = 3 * gib
    assert frugal.activation_budget(2 * gib // token) == 3 * gib

    # A pass over few tokens costs as much as launching it.
    cost = [frugal.pass_cost(tokens, 60 * gib) for tokens in (1024, 2048, 10**9)]
    assert cost[0] == cost[1] > 2048 and cost[2] > 10**9


def test_logits_exist_for_a_chunk_of_positions_only(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = branching_rows(2)
    (pack,) = build_packs(rows, 10_000)
    whole, _ = policy.token_logprobs(pack, adapter=None)
    seen: list[int] = []
    projection = policy.base.get_output_embeddings()
    hook = projection.register_forward_pre_hook(lambda module, inputs: seen.append(len(inputs[0])))
    monkeypatch.setattr(policy, "chunk", 8)
    chunked, _ = policy.token_logprobs(pack, adapter=None)
    hook.remove()
    torch.testing.assert_close(chunked, whole)
    assert max(seen) == 8 and len(seen) > 5


def test_a_position_is_projected_once_whatever_was_sampled_there() -> None:
    rows = [make_row([1, 2, 3, 10 + i % 2, 7], [3, 4]) for i in range(6)]
    rows.append(make_row([1, 2, 3, 10, 7], [3], temperature=0.5))
    (pack,) = build_packs(rows, 100)
    wanted = logprobs.Wanted.of(pack)
    assert len(wanted.position_U) == 4  # after 3 at two temperatures, and after 10 and 11
    assert len(wanted.target_E) == 5
    assert np.array_equal(wanted.target_E[wanted.entry_RT[:, 0]], [10, 11] * 3 + [10])


def test_a_pack_without_targets(policy: Policy) -> None:
    (pack,) = build_packs([make_row([1, 2, 3], [])], 10)
    logp_RT, entropy_RT = policy.token_logprobs(pack, adapter=None, entropy=True)
    assert logp_RT.shape == (1, 0) and entropy_RT is not None and entropy_RT.shape == (1, 0)
