"""PreflightReport: the numbers of a preflight, a table of them, and a warning with its number where one is due.

Every threshold is a constant here with its reason. Runs nothing.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..training.explain import SHORT_BY_DESIGN
from ..trajectories import TrajectoryGroup

if TYPE_CHECKING:
    import pandas as pd

SOLVE_LOW, SOLVE_HIGH = 0.05, 0.95
"""Outside of these nearly every group has equal rewards. ART's FAQ asks for about 30 %:
https://art.openpipe.ai/getting-started/faq"""
CUT_SHARE = 0.5
"""Above it most answers were never seen to their end."""
CONTEXT_SHARE = 0.9
"""Training makes answers longer or shorter; above it the next ones may not fit."""
LARGE_REWARD = 100.0
"""Rewards beyond it look like a raw count (points, tokens), which has no upper end."""
SCALE_RATIO = 10.0
"""Between the largest rewards of two groups. Spreads would not do: they differ by chance where rewards are rare."""
LENGTH_R, LENGTH_N = 0.7, 12
"""At |r| = 0.7 and n = 12 chance alone (two-sided, before the group means are taken off) has p = 0.01."""
MOST_KINDS = 3
"""Kinds of exceptions that are named."""
Z95 = 1.959964


@dataclass(frozen=True, kw_only=True)
class PreflightReport:
    """What a preflight measured. `print` shows a table, a notebook the same as HTML; None: not known.

    Tokens are known where choices carry token ids, as those from `model.openai_client()` do. `reward_spreads` has one
    standard deviation a group, None where fewer than two rollouts were scored. Means are over rollouts that returned.
    """

    rollouts: int  # those that returned and those that failed
    scenarios: int
    scored: int  # with a finite reward
    nonfinite_rewards: int
    solved: int | None  # of `scored`
    solved_rule: str
    reward_mean: float | None
    reward_min: float | None
    reward_max: float | None
    reward_spreads: tuple[float | None, ...]
    reward_scales: tuple[float | None, ...]  # the largest absolute reward of each group
    length_correlation: float | None  # reward with tokens an answer, inside groups
    length_correlation_n: int
    turns_mean: float | None
    turns_max: int | None
    prompt_tokens_mean: float | None  # of each rollout's longest prompt
    prompt_tokens_max: int | None
    completion_tokens_mean: float | None  # sampled in a rollout
    completion_tokens_max: int | None
    row_tokens_mean: float | None  # what training reads of a rollout
    longest: int | None  # prompt and answer together
    context_length: int | None
    context_full: int  # rollouts that ended because the context was full
    answers: int
    answers_cut: int  # by max_tokens or the context
    answers_cut_at: tuple[int, ...]  # the different lengths of those, in tokens
    answers_without_tokens: int
    exceptions: Mapping[str, int]  # type → count, the most frequent first
    exception_examples: Mapping[str, str]  # type → its first message
    seconds: float  # wall time of all rollouts, side by side
    seconds_per_rollout: float | None  # mean, each from its own start
    rollouts_per_step: int | None
    train_seconds_per_rollout: float | None  # from this model's earlier steps
    steps: int | None
    groups_per_step: int | None
    groups: tuple[TrajectoryGroup, ...] = field(repr=False, default=())

    # What follows from the numbers -----------------------------------------------------------------

    @property
    def solve_rate(self) -> float | None:
        """Solved rollouts as a share of the scored ones; None where the rule was left open or nothing was scored."""
        return None if self.solved is None or not self.scored else self.solved / self.scored

    @property
    def groups_with_signal(self) -> int:
        """Groups whose rewards differ: only those train."""
        return sum(bool(s) for s in self.reward_spreads)

    @property
    def cut_share(self) -> float:
        return self.answers_cut / self.answers if self.answers else 0.0

    @property
    def sampling_seconds_per_step(self) -> float | None:
        """At the rate measured here. More rollouts side by side are usually faster each, so this is rather too long."""
        return None if self.rollouts_per_step is None else self.seconds / self.rollouts * self.rollouts_per_step

    @property
    def training_seconds_per_step(self) -> float | None:
        """From the model's own earlier steps; None before the first: how long training takes was not measured."""
        known = self.train_seconds_per_rollout is not None and self.rollouts_per_step is not None
        return self.train_seconds_per_rollout * self.rollouts_per_step if known else None  # type: ignore[operator]

    @property
    def seconds_per_step(self) -> float | None:
        """Sampling, and training where it is known."""
        sampling = self.sampling_seconds_per_step
        return None if sampling is None else sampling + (self.training_seconds_per_step or 0.0)

    @property
    def seconds_for_run(self) -> float | None:
        return _times(self.seconds_per_step, self.steps)

    @property
    def sampled_tokens_per_step(self) -> float | None:
        return _times(self.completion_tokens_mean, self.rollouts_per_step)

    @property
    def row_tokens_per_step(self) -> float | None:
        """Tokens that training reads in a step, before shared prefixes are stored once."""
        return _times(self.row_tokens_mean, self.rollouts_per_step)

    # In words ----------------------------------------------------------------------------------------

    @property
    def warnings(self) -> list[str]:
        """What would keep the run from learning, worst first, each with its number. Empty: nothing was found."""
        found = [*self._failures(), *self._signal(), *self._scale(), *self._lengths()]
        return [text for text in found if text]

    def _failures(self) -> list[str]:
        out = []
        if failed := sum(self.exceptions.values()):
            kinds = [
                f"{n} × {kind} (e.g. {_short(self.exception_examples.get(kind, ''), 100)})"
                for kind, n in list(self.exceptions.items())[:MOST_KINDS]
            ]
            more = f", and {len(self.exceptions) - MOST_KINDS} more kinds" if len(self.exceptions) > MOST_KINDS else ""
            out.append(f"{failed} of {self.rollouts} rollouts failed: {', '.join(kinds)}{more}")
        if self.answers == 0 and failed < self.rollouts:
            out.append(
                "No rollout holds a sampled choice (0 answers), so there is nothing to train: put the Choice itself "
                "into messages_and_choices"
            )
        elif self.answers_without_tokens:
            out.append(
                f"{self.answers_without_tokens} of {self.answers} answers carry no token ids and cannot be trained: "
                "sample through model.openai_client()"
            )
        if self.nonfinite_rewards:
            out.append(f"{self.nonfinite_rewards} rewards are NaN or infinite; such rollouts do not train")
        unscored = self.rollouts - failed - self.scored - self.nonfinite_rewards
        if unscored:
            out.append(f"{unscored} of {self.rollouts} rollouts have no reward (None); such rollouts do not train")
        return out

    def _signal(self) -> list[str]:
        out = []
        rate = self.solve_rate
        if rate is not None and not SOLVE_LOW <= rate <= SOLVE_HIGH:
            low, high = wilson(self.solved or 0, self.scored)
            what = (
                "The base model hardly ever succeeds: easier scenarios, partial credit, a better prompt, or SFT first"
                if rate < SOLVE_LOW
                else "There is little left to learn: harder scenarios, or a reward that tells good from better"
            )
            out.append(
                f"Solve rate {rate:.0%} ({self.solved} of {self.scored} by {self.solved_rule}; 95 % interval "
                f"{low:.0%}–{high:.0%}). {what}"
            )
        comparable = [s for s in self.reward_spreads if s is not None]
        if comparable and not self.groups_with_signal:
            out.append(
                f"0 of {len(comparable)} groups have a spread in their rewards, so nothing would train: sample at "
                "temperature 1, use larger groups, or give partial credit"
            )
        elif self.scored and not comparable:
            out.append("0 groups have two scored rollouts, so none can be compared: use group_size of 2 or more")
        return out

    def _scale(self) -> list[str]:
        out = []
        if self.reward_min is not None and self.reward_max is not None:
            largest = max(abs(self.reward_min), abs(self.reward_max))
            if largest > LARGE_REWARD:
                out.append(
                    f"Rewards look unbounded: from {self.reward_min:g} to {self.reward_max:g}. Divide by the best "
                    "possible, or take the logarithm, so that they stay between about 0 and 1"
                )
        scales = [s for s in self.reward_scales if s]
        if len(scales) > 1 and max(scales) > SCALE_RATIO * min(scales):
            out.append(
                f"Rewards are of very different scale between groups: the largest is {min(scales):.4g} in one and "
                f"{max(scales):.4g} in another ({max(scales) / min(scales):.0f} times). scale_rewards='group' (the "
                "default) evens that out; with 'batch' or 'none' a few groups decide the step"
            )
        return out

    def _lengths(self) -> list[str]:
        out = []
        if self.cut_share > CUT_SHARE and max(self.answers_cut_at, default=0) > SHORT_BY_DESIGN:
            at = _span(self.answers_cut_at)
            out.append(
                f"{self.cut_share:.0%} of the answers ({self.answers_cut} of {self.answers}) were cut by length"
                f"{f', at {at} tokens' if at else ''}: raise max_tokens in the rollout's requests"
            )
        if self.context_full:
            out.append(f"{self.context_full} of {self.rollouts} rollouts filled the context of {self.context_length}")
        elif self.longest and self.context_length and self.longest > CONTEXT_SHARE * self.context_length:
            out.append(
                f"The longest conversation has {self.longest} of {self.context_length} tokens "
                f"({self.longest / self.context_length:.0%} of the context)"
            )
        r, n = self.length_correlation, self.length_correlation_n
        if r is not None and n >= LENGTH_N and abs(r) >= LENGTH_R:
            out.append(
                f"Reward goes with {'longer' if r > 0 else 'shorter'} answers (r = {r:.2f}, n = {n}, inside groups): a "
                "sign that the wording is rewarded and not what it says"
            )
        return out

    def rows(self) -> list[tuple[str, str]]:
        """What the table shows: a name and a value in words."""
        cut = f"{self.answers_cut} of {self.answers} ({self.cut_share:.0%})"
        if self.answers_cut_at:
            cut += f", at {_span(self.answers_cut_at)} tokens"
        spreads = [s for s in self.reward_spreads if s is not None]
        mean_spread = math.fsum(spreads) / len(spreads) if spreads else None
        failed = ", ".join(f"{n} × {kind}" for kind, n in list(self.exceptions.items())[:MOST_KINDS])
        rows = [
            ("rollouts", f"{self.rollouts} ({self.scenarios} scenarios), {self.scored} scored"),
            ("failed", f"{sum(self.exceptions.values())}{f': {failed}' if failed else ''}"),
            ("solve rate", self._solve_rate()),
            ("reward", f"mean {_n(self.reward_mean)}, from {_n(self.reward_min)} to {_n(self.reward_max)}"),
            ("groups with a spread", f"{self.groups_with_signal} of {self.scenarios}, mean spread {_n(mean_spread)}"),
            ("reward with answer length", self._correlation()),
            ("turns", f"mean {_n(self.turns_mean)}, most {_n(self.turns_max)}"),
            ("prompt tokens", f"mean {_n(self.prompt_tokens_mean)}, most {_n(self.prompt_tokens_max)}"),
            ("sampled tokens", f"mean {_n(self.completion_tokens_mean)}, most {_n(self.completion_tokens_max)}"),
            ("longest conversation", f"{_n(self.longest)} of {_n(self.context_length)} tokens"),
            ("answers cut by length", cut if self.answers else "—"),
            ("seconds", f"{self.seconds:.1f} for all, {_n(self.seconds_per_rollout)} a rollout"),
        ]
        return rows + self._estimates()

    def _solve_rate(self) -> str:
        rate = self.solve_rate
        if rate is None:
            return f"— ({self.solved_rule})"
        low, high = wilson(self.solved or 0, self.scored)
        return f"{rate:.0%} ({self.solved} of {self.scored}, {low:.0%}–{high:.0%}; {self.solved_rule})"

    def _correlation(self) -> str:
        if self.length_correlation is None:
            return "—"
        few = "" if self.length_correlation_n >= LENGTH_N else ", too few to judge"
        return f"r = {self.length_correlation:.2f} (n = {self.length_correlation_n}{few})"

    def _estimates(self) -> list[tuple[str, str]]:
        if self.rollouts_per_step is None:
            return [("a step", "pass groups_per_step= (and steps=) for time and tokens of a step and of the run")]
        sampling, training = self.sampling_seconds_per_step, self.training_seconds_per_step
        time = f"{duration(sampling)} sampling"
        time += " (training not measured yet)" if training is None else f" + {duration(training)} training"
        tokens = f"{_count(self.sampled_tokens_per_step)} sampled, {_count(self.row_tokens_per_step)} in rows"
        rows = [(f"a step of {self.rollouts_per_step} rollouts", time), ("tokens a step", tokens)]
        if self.steps is not None:
            total = duration(self.seconds_for_run) + (", without training" if training is None else "")
            tokens = f"{_count(_times(self.sampled_tokens_per_step, self.steps))} tokens sampled"
            rows.append((f"the run of {self.steps} steps", f"{total}; {tokens}"))
        return rows

    @property
    def table(self) -> pd.DataFrame:
        """The rows of the table as a DataFrame with the columns `what` and `measured`."""
        import pandas as pd

        return pd.DataFrame(self.rows(), columns=["what", "measured"])

    def __str__(self) -> str:
        rows = self.rows()
        width = max(len(name) for name, _ in rows)
        lines = ["preflight", *(f"  {name:<{width}}  {value}" for name, value in rows)]
        lines += [f"  warning: {text}" for text in self.warnings] or ["  no warnings"]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        cell = "text-align:left;padding:2px 12px 2px 0"
        rows = "".join(
            f'<tr><th scope="row" style="{cell};font-weight:normal;opacity:.75">{html.escape(name)}</th>'
            f'<td style="{cell}">{html.escape(value)}</td></tr>'
            for name, value in self.rows()
        )
        warnings = "".join(f"<li>{html.escape(text)}</li>" for text in self.warnings)
        below = f'<ul style="border-left:3px solid #D55E00">{warnings}</ul>' if warnings else "<p>No warnings.</p>"
        return f'<div class="artnb-preflight"><table>{rows}</table>{below}</div>'


def wilson(successes: int, n: int) -> tuple[float, float]:
    """95 % score interval of a share (Wilson 1927, https://doi.org/10.1080/01621459.1927.10502953)."""
    p, z2 = successes / n, Z95**2
    middle = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = Z95 / (1 + z2 / n) * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    return max(0.0, middle - half), min(1.0, middle + half)


def duration(seconds: float | None) -> str:
    """A time as people say it: `12 s`, `3.5 min`, `1.2 h`."""
    if seconds is None:
        return "—"
    if seconds < 90:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _times(value: float | None, n: int | None) -> float | None:
    return None if value is None or n is None else value * n


def _n(value: float | None) -> str:
    return "—" if value is None else str(value) if isinstance(value, int) else f"{value:.3g}"


def _count(value: float | None) -> str:
    return "—" if value is None else f"{value:,.0f}"


def _span(values: tuple[int, ...]) -> str:
    if not values:
        return ""
    return str(values[0]) if len(values) == 1 else f"{values[0]} to {values[-1]}"


def _short(text: str, limit: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"
