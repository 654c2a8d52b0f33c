"""What went wrong when a judge was asked, and what to do about it, in one sentence.

LiteLLM's errors are subclasses of openai's, so one list serves both.
"""

from __future__ import annotations

import openai


def explain(error: openai.OpenAIError, name: str) -> str:
    """The text of a JudgeError."""
    said = _line(error)
    if isinstance(error, openai.APIConnectionError) and error.__cause__ is not None:
        said += f" ({_line(error.__cause__)})"  # openai's own text is "Connection error."
    return f"the judge {name} {_what(error)}. It said: {said}"


def _what(error: openai.OpenAIError) -> str:
    if isinstance(error, openai.AuthenticationError | openai.PermissionDeniedError):
        return "refused the key: give another api_key, or set the variable that its provider reads"
    if isinstance(error, openai.NotFoundError):
        return "is not known there: look at the model's name and the base_url (which usually ends in /v1)"
    if isinstance(error, openai.RateLimitError):
        return "has no room for more requests: judge fewer groups at once, or wait"
    if isinstance(error, openai.APITimeoutError):
        return "gave no answer in time: raise the client's timeout, or judge fewer groups at once"
    if isinstance(error, openai.APIConnectionError):
        return "cannot be reached: is it running, and is the base_url right?"
    if "LLM Provider NOT provided" in str(error):  # LiteLLM's words for it
        return "names no provider: a LiteLLM name is provider/model, e.g. openai/gpt-5-mini"
    if isinstance(error, openai.BadRequestError | openai.UnprocessableEntityError):
        return (
            "refused the question; if it is too long for the judge's context, use a judge with a larger one (Ollama's "
            "num_ctx is 4,096 or 8,192 unless it is set) or fewer trajectories in a group"
        )
    if isinstance(error, openai.APIStatusError):
        return f"failed with status {error.status_code}; ask again later"
    return "could not be asked"


def _line(error: BaseException, limit: int = 300) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 1] + "…"
