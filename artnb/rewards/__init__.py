"""Rewards: judged against each other (RULER), verifiable ones, saved trajectories under another reward, and preflight.

from artnb.rewards import Judge, ruler_score_group
"""

from __future__ import annotations

from .combine import Weighted
from .rescoring import rescore
from .verifiable import ExactMatch, JsonSchema, Numeric, Regex, ToolSuccess

__all__ = ["ExactMatch", "JsonSchema", "Numeric", "Regex", "ToolSuccess", "Weighted", "rescore"]
