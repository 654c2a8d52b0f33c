"""An import path that users of ART know. The code lives in artnb.compat.helpers."""

from ..compat.helpers import convert_litellm_choice_to_openai

__all__ = ["convert_litellm_choice_to_openai"]
