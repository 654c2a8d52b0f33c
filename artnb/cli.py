"""The `artnb` command. Each subcommand imports what it needs, so that `artnb --help` answers at once."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import __version__
from .errors import ArtnbError, CheckpointError, ConfigError

SUMMARY = "Train LLM agents by reinforcement learning from inside a notebook, on one GPU or none."


def parser() -> argparse.ArgumentParser:
    """The command line, as a parser."""
    top = argparse.ArgumentParser(prog="artnb", description=SUMMARY)
    top.add_argument("--version", action="version", version=f"artnb {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    quick = commands.add_parser(
        "quickstart",
        help="train a small model to play tic-tac-toe, here and now",
        description="Train SmolLM2-135M to play tic-tac-toe by GRPO; run it again to resume or to see the result.",
    )
    quick.add_argument("--out", type=Path, default=Path("quickstart-run"), help="folder for everything it writes")
    quick.add_argument("--steps", type=int, default=None, help="training steps")
    quick.add_argument("--groups", type=int, default=None, help="scenarios per step")
    quick.add_argument("--group-size", type=int, default=None, help="games per scenario")
    quick.add_argument("--learning-rate", type=float, default=None)
    quick.add_argument("--eval-games", type=int, default=None, help="held-out games before and after")
    quick.add_argument("--seed", type=int, default=0, help="of scenarios, sampling and the adapter")
    quick.add_argument("--base-model", default=None, help="a folder or Hugging Face id instead of the demo model")
    quick.add_argument("--device", default="auto", help="cpu, cuda, mps or auto")
    plan = commands.add_parser(
        "plan",
        help="say what fits on a GPU, without one",
        description="Plan how vLLM and the trainer share one GPU's memory. Needs no GPU and downloads no weights.",
    )
    plan.add_argument("--model", required=True, help="a folder or Hugging Face id")
    plan.add_argument("--gpu", default=None, help="a card's name, e.g. T4; this machine's own without it")
    plan.add_argument("--context-length", type=int, default=None, help="tokens of prompt and answer together")
    plan.add_argument("--rank", type=int, default=None, help="of the LoRA adapter")
    plan.add_argument("--rollouts", type=int, default=None, help="of one step: group size times groups")
    plan.add_argument("--max-running", type=int, default=None, help="rollouts side by side")
    plan.add_argument("--dtype", default=None, help="bfloat16, float16 or float32; by the card without it")
    plan.add_argument("--load-in-4bit", action="store_true", help="base weights in 4-bit NF4 (QLoRA)")
    plan.add_argument("--load-in-fp8", action="store_true", help="base weights in FP8")
    plan.add_argument("--sleep", default=None, help="auto, always or never")
    _add_serve(commands)
    export = commands.add_parser(
        "export",
        help="write a checkpoint as a model that other programs load",
        description="Export a checkpoint as a merged model or a LoRA adapter; prints the lines that serve it.",
    )
    export.add_argument("model", type=Path, help="a model's folder, e.g. .art/games/models/agent, or a PEFT adapter's")
    export.add_argument("out", type=Path, help="a new or empty folder, or an earlier export, which is replaced")
    export.add_argument("--step", type=int, default=None, help="the newest without it")
    export.add_argument("--format", default="merged", help="merged (the default) or adapter")
    export.add_argument("--dtype", default="auto", help="of merged weights: float32, bfloat16, float16 or auto")
    export.add_argument("--base-model", default=None, help="merge into these weights instead of the base model's own")
    return top


def _add_serve(commands: Any) -> None:
    serve = commands.add_parser(
        "serve",
        allow_abbrev=False,  # else --api-key would be taken, and a key would stand in the list of processes
        help="put this machine's GPU behind RemoteBackend, for notebooks elsewhere",
        description="Serve and train models for RemoteBackend clients. The key is read from --api-key-file or "
        "$ARTNB_API_KEY, or made and printed. Interrupt it to end it; steps are complete or not there.",
    )
    serve.add_argument("--path", type=Path, default=Path(".art"), help="folder of checkpoints and histories")
    serve.add_argument("--host", default="127.0.0.1", help="0.0.0.0 listens on every network; use TLS then")
    serve.add_argument("--port", type=int, default=8765, help="0 is any free one")
    serve.add_argument("--api-key-file", type=Path, default=None, help="a file that holds the key and nothing else")
    serve.add_argument("--tls-cert", type=Path, default=None, help="PEM file, with the chain")
    serve.add_argument("--tls-key", type=Path, default=None, help="PEM file")
    serve.add_argument("--max-body-mb", type=int, default=64, help="largest step that is taken, as sent (packed)")
    serve.add_argument(
        "--base-model",
        action="append",
        default=None,
        help="a folder or Hugging Face id that clients may register; may be repeated. Without it any id, no folder",
    )
    serve.add_argument("--device", default=None, help="cpu, cuda, mps or auto")
    serve.add_argument("--dtype", default=None, help="bfloat16, float16, float32 or auto")
    serve.add_argument("--engine", default=None, help="transformers, vllm, vllm-process or auto")
    serve.add_argument("--context-length", type=int, default=None, help="tokens of prompt and answer together")
    serve.add_argument("--max-running", type=int, default=None, help="rollouts side by side")
    serve.add_argument("--load-in-4bit", action="store_true", help="base weights in 4-bit NF4 (QLoRA)")
    serve.add_argument("--load-in-fp8", action="store_true", help="base weights in FP8")
    serve.add_argument("--sleep", default=None, help="auto, always or never")
    serve.add_argument("--gpu-memory-utilization", type=float, default=None, help="share of the card for vLLM")
    serve.add_argument("--served-checkpoints", type=int, default=None, help="older checkpoints that stay loaded")
    serve.add_argument("--seed", type=int, default=None)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; a known error becomes one line and exit code 1."""
    options = parser().parse_args(argv)
    try:
        {"quickstart": _quickstart, "plan": _plan, "serve": _serve, "export": _export}[options.command](options)
    except ArtnbError as error:
        print(f"artnb: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("artnb: interrupted; run the same command again to go on where it stopped", file=sys.stderr)
        return 130
    return 0


def _chosen(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    """The options that were given; the others keep the defaults of what they are passed to."""
    return {name: getattr(options, name) for name in names if getattr(options, name) is not None}


def _quickstart(options: argparse.Namespace) -> None:
    from .quickstart import Plan, quickstart

    chosen = _chosen(options, "steps", "groups", "group_size", "learning_rate", "eval_games")
    plan = Plan(**chosen, seed=options.seed, base_model=options.base_model, device=options.device)
    asyncio.run(quickstart(options.out, plan))


def _plan(options: argparse.Namespace) -> None:
    from .config import LoraConfig
    from .local.cards import find_card, this_card
    from .local.plan import plan_memory
    from .local.shapes import shape_of

    card = this_card() if options.gpu is None else find_card(options.gpu)
    names = ("context_length", "rollouts", "max_running", "dtype", "load_in_4bit", "load_in_fp8", "sleep")
    lora = LoraConfig() if options.rank is None else LoraConfig(r=options.rank)
    print(plan_memory(shape_of(options.model), card, lora=lora, **_chosen(options, *names)).table())


def _serve(options: argparse.Namespace) -> None:
    try:
        from .remote.serve import serve
    except ImportError as error:
        raise ConfigError(f'artnb serve needs {error.name}: pip install "artnb[local]"') from error
    names = ("path", "device", "dtype", "engine", "context_length", "max_running", "load_in_4bit", "load_in_fp8")
    serve(
        host=options.host,
        port=options.port,
        api_key_file=options.api_key_file,
        tls_cert=options.tls_cert,
        tls_key=options.tls_key,
        max_body_mb=options.max_body_mb,
        base_models=options.base_model,
        say=lambda line: print(f"artnb: {line}", flush=True),
        **_chosen(options, *names, "sleep", "gpu_memory_utilization", "served_checkpoints", "seed"),
    )


def _export(options: argparse.Namespace) -> None:
    from .training.checkpoints import CheckpointStore
    from .training.export import Source, export_checkpoint

    folder, step = options.model, options.step
    if not (folder / "adapter_config.json").is_file():
        store = CheckpointStore(folder)
        step = store.latest() if step is None else step
        if step is None:
            raise CheckpointError(f"{folder} holds neither checkpoints nor a PEFT adapter")
        folder = store.path(step)
    elif step is not None:
        raise ConfigError(f"--step is for a model's folder; {folder} is one adapter")
    source = Source(folder, options.model.resolve().name, step)
    chosen = {"format": options.format, "dtype": options.dtype, "base_model": options.base_model}
    print(export_checkpoint(source, options.out, **chosen))


if __name__ == "__main__":
    sys.exit(main())
