"""LangGraph and LangChain agents, unchanged: a chat model of theirs that asks the model in training.

Importing it loads neither library; `pip install "artnb[langgraph]"` brings both.
"""

from .init import init_chat_model
from .rollout import wrap_rollout

__all__ = ["init_chat_model", "wrap_rollout"]
