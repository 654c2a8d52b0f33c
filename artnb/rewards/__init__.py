"""Rewards: judged against each other (RULER), verifiable ones, saved trajectories under another reward, and preflight.

from artnb.rewards import Judge, ruler_score_group
"""

from __future__ import annotations

from .accuracy import JudgeAccuracy, JudgePair, judge_accuracy, judge_pairs
from .combine import Weighted
from .judges import Judge
from .likelihood import LikelihoodJudge
from .rescoring import rescore
from .ruler import TrajectoryScore, ruler, ruler_score_group
from .verifiable import ExactMatch, JsonSchema, Numeric, Regex, ToolSuccess

__all__ = [
    "ExactMatch",
    "JsonSchema",
    "Judge",
    "JudgeAccuracy",
    "JudgePair",
    "LikelihoodJudge",
    "Numeric",
    "Regex",
    "ToolSuccess",
    "TrajectoryScore",
    "Weighted",
    "judge_accuracy",
    "judge_pairs",
    "rescore",
    "ruler",
    "ruler_score_group",
]
