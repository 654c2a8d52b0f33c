"""The `artnb` command. Each subcommand imports what it needs, so that `artnb --help` answers at once."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from . import __version__
from .errors import ArtnbError

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
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; a known error becomes one line and exit code 1."""
    options = parser().parse_args(argv)
    try:
        from .quickstart import Plan, quickstart

        names = ("steps", "groups", "group_size", "learning_rate", "eval_games")
        chosen = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
        plan = Plan(**chosen, seed=options.seed, base_model=options.base_model, device=options.device)
        asyncio.run(quickstart(options.out, plan))
    except ArtnbError as error:
        print(f"artnb: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("artnb: interrupted; run the same command again to go on where it stopped", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
