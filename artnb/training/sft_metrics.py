"""What the optimizer steps of one supervised call say together. No torch here."""

from __future__ import annotations

_SUMMED = ("updates", "skipped_nonfinite", "packs", "unique_tokens", "row_tokens", "seconds")
_GREATEST = ("peak_memory_bytes",)
_NEWEST = ("learning_rate",)


class Means:
    """Collects the metrics of optimizer steps: counts and seconds are summed, the peak memory kept, others averaged."""

    def __init__(self) -> None:
        self._steps: list[dict[str, float]] = []

    def add(self, metrics: dict[str, float]) -> None:
        self._steps.append(metrics)

    def last(self, name: str) -> float:
        """The newest value of a metric; 0 while there is none."""
        return next((step[name] for step in reversed(self._steps) if name in step), 0.0)

    def of_all(self) -> dict[str, float]:
        """One value of each metric, and "loss_first" and "loss_last", the losses of the first and the last step."""
        found: dict[str, float] = {}
        for name in dict.fromkeys(name for step in self._steps for name in step):
            values = [step[name] for step in self._steps if name in step]
            if name in _SUMMED:
                found[name] = sum(values)
            elif name in _GREATEST:
                found[name] = max(values)
            else:
                found[name] = values[-1] if name in _NEWEST else sum(values) / len(values)
            if name == "loss":
                found["loss_first"], found["loss_last"] = values[0], values[-1]
        if "row_tokens" in found:
            found["tokens_per_second"] = found["row_tokens"] / max(found["seconds"], 1e-9)
        return found
