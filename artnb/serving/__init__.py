"""An OpenAI-compatible endpoint over any engine. The endpoint knows text; it does not know training."""
