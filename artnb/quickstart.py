"""`artnb quickstart`: a small language model learns tic-tac-toe on this machine, and you can read everything it did.

It uses only what a notebook would: `TrainableModel`, `LocalBackend`, gather, train. The game is the one of
notebooks/tic_tac_toe. Run again, it goes on where it stopped.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

from .config import LoraConfig, TrainConfig, check_number, config
from .demo import demo_model
from .durable import replace_file
from .errors import ConfigError
from .gather import gather_trajectory_groups
from .local.backend import LocalBackend
from .model import TrainableModel
from .notebook.plots import reward_curve
from .trajectories import Trajectory, TrajectoryGroup

HELD_OUT = 1_000_000
"""Scenario seeds from here on are for evaluation; training uses those below."""
SHOWN = ("reward", "legal_move_rate", "win", "draw", "loss", "illegal")


@config
class Plan:
    """How long to train, and on what. The defaults take a few minutes on two CPU cores."""

    steps: int = 16
    groups: int = 6  # scenarios per step
    group_size: int = 8  # games per scenario
    learning_rate: float = 5e-4
    eval_games: int = 128  # held-out games before and after
    seed: int = 0  # of scenarios, sampling and the adapter
    base_model: str | None = None  # None: the demo model
    device: str = "auto"

    def __post_init__(self) -> None:
        for option, low in (("steps", 1), ("groups", 1), ("group_size", 2), ("eval_games", 0), ("seed", 0)):
            check_number("quickstart", option, getattr(self, option), low=low, whole=True)
        check_number("quickstart", "learning_rate", self.learning_rate, above=0.0)


def load_game() -> ModuleType:
    """The tic-tac-toe module: beside the notebooks in a checkout, inside the package when installed from a wheel."""
    here = Path(__file__).parent
    places = [here / "games" / "tic_tac_toe.py", here.parent / "notebooks" / "tic_tac_toe" / "tic_tac_toe.py"]
    for path in places:
        if path.is_file():
            spec = importlib.util.spec_from_file_location("tic_tac_toe", path)
            assert spec is not None and spec.loader is not None
            game = importlib.util.module_from_spec(spec)
            sys.modules.setdefault("tic_tac_toe", game)
            spec.loader.exec_module(game)
            return game
    raise ConfigError(f"the quickstart's game is missing; looked for {' and '.join(map(str, places))}")


async def play(
    model: TrainableModel, game: ModuleType, scenarios: list[Any], size: int, desc: str, sampling: int = 0
) -> Any:
    """Each scenario played `size` times, with sampling seeds that follow from the scenario's and from `sampling`."""
    return await gather_trajectory_groups(
        (
            TrajectoryGroup(game.rollout(model, s, seed=s.seed * 1000 + sampling + i) for i in range(size))
            for s in scenarios
        ),
        pbar_desc=desc,
        max_exceptions=0.1,
    )


async def evaluate(model: TrainableModel, game: ModuleType, plan: Plan, desc: str) -> dict[str, float]:
    """Means over held-out games, every one a scenario of its own. Logged under split "val" at the model's step."""
    groups = await play(model, game, game.scenarios(plan.eval_games, HELD_OUT), 1, desc, sampling=plan.seed)
    means: dict[str, float] = game.means(trajectory for group in groups for trajectory in group)
    await model.log(groups, split="val", metrics=means)
    return means


def line(name: str, values: dict[str, float]) -> str:
    """One line of the table: name and the means people want to see."""
    return f"  {name:<8}" + "".join(f"{key} {values[key]:>6.2f}   " for key in SHOWN if key in values)


async def quickstart(out: Path, plan: Plan) -> dict[str, Any]:
    """Train, evaluate before and after, write curve.png and summary.json below `out`; returns the summary."""
    started = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    game = load_game()
    base = plan.base_model or str(demo_model())
    async with LocalBackend(path=out / "art", device=plan.device, seed=plan.seed) as backend:
        name = f"tic-tac-toe-{plan.seed}"
        model = TrainableModel(name, "quickstart", base, lora=LoraConfig(seed=plan.seed), base_path=out / "art")
        await model.register(backend)
        first = await model.get_step()
        known = {int(row["step"]): row for _, row in model.history().iterrows()} if first else {}
        before = _from_history(known.get(0)) if first else {}
        if not before and plan.eval_games and first == 0:
            before = await evaluate(model, game, plan, "before: held-out games")
        train = TrainConfig(learning_rate=plan.learning_rate)
        for step in range(first, plan.steps):
            # Steps never share a scenario, nor do seeds of the quickstart below HELD_OUT / 1000.
            scenarios = game.scenarios(plan.groups, first_seed=plan.seed * 1000 + step * plan.groups)
            groups = await play(model, game, scenarios, plan.group_size, f"games of step {step + 1}")
            result = await model.train(groups, train)
            print(f"{result}   [{time.monotonic() - started:.0f} s]", flush=True)
        after = _from_history(known.get(plan.steps))
        if not after and plan.eval_games:
            after = await evaluate(model, game, plan, "after: held-out games")
        return await _report(out, plan, model, game, before, after, time.monotonic() - started)


def _from_history(row: Any) -> dict[str, float]:
    if row is None:
        return {}
    return {k.removeprefix("val/"): float(v) for k, v in row.items() if k.startswith("val/") and v == v}


async def _report(
    out: Path,
    plan: Plan,
    model: TrainableModel,
    game: ModuleType,
    before: dict[str, float],
    after: dict[str, float],
    seconds: float,
) -> dict[str, Any]:
    curve = out / "curve.png"
    reward_curve(model.history(), path=curve, title=f"tic-tac-toe against a random opponent, {plan.steps} steps")
    summary = {"plan": asdict(plan), "before": before, "after": after, "seconds": round(seconds, 1)}
    replace_file(out / "summary.json", [json.dumps(summary, indent=2).encode()])
    shown: Trajectory = await game.rollout(model, game.Scenario(seed=HELD_OUT - 1), seed=0)
    print(f"\nA game after {await model.get_step()} steps (reward {shown.reward}):")
    for message in shown.messages():
        print(f"  {message['role']:>9}: {message.get('content')}")
    print(f"\n{plan.eval_games} held-out games, means:")
    for label, values in (("before", before), ("after", after)):
        if values:
            print(line(label, values))
    print(f"\n{seconds / 60:.1f} minutes. Curve: {curve}   Summary: {out / 'summary.json'}")
    question = json.dumps(shown.messages()[:2], ensure_ascii=False)
    print(
        "\nTo chat with the result, in Python or a notebook:\n\n"
        "    import artnb as art\n"
        f"    model = art.TrainableModel({model.name!r}, 'quickstart', {model.base_model!r})\n"
        f"    model.register(art.LocalBackend(path={str(out / 'art')!r}))\n"
        f"    print(model.chat({question}, max_tokens=2).choices[0].message.content)\n"
    )
    return summary
