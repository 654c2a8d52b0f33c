"""History records as pandas frames. pandas is imported inside: `import artnb` must not wait for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

TrajectoryRow = tuple[int, str, Mapping[str, Any] | None, Mapping[str, Any]]  # step, split, group's head, record


def column(split: str, name: str) -> str:
    """`<split>/<name>`; a name that already begins with its split stays."""
    return name if name.startswith(f"{split}/") else f"{split}/{name}"


def metrics_frame(records: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """One row per step, ascending; of a value that was logged twice the last one."""
    import pandas as pd

    rows: dict[int, dict[str, float]] = {}
    columns: dict[str, None] = {}  # in the order of their first step, so that a resumed run's frame is the same
    for record in records:
        row = rows.setdefault(record["step"], {})
        for name, value in record["metrics"].items():
            row[column(record["split"], name)] = float("nan") if value is None else float(value)
    for step in sorted(rows):
        columns.update(dict.fromkeys(rows[step]))
    frame = pd.DataFrame(
        {name: [rows[step].get(name, float("nan")) for step in sorted(rows)] for name in columns}, dtype="float64"
    )
    frame.insert(0, "step", pd.Series(sorted(rows), dtype="int64"))
    return frame


def metrics_long_frame(records: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """One row per (step, split, name), the last value of each."""
    import pandas as pd

    last: dict[tuple[int, str, str], tuple[Any, float]] = {}
    for record in records:
        for name, value in record["metrics"].items():
            last[record["step"], record["split"], name] = (value, record["time"])
    rows = [(*key, value, at) for key, (value, at) in sorted(last.items(), key=lambda item: item[0][0])]
    frame = pd.DataFrame(rows, columns=["step", "split", "name", "value", "time"])
    frame["value"] = frame["value"].astype("float64")
    frame["step"] = frame["step"].astype("int64")
    frame["time"] = pd.to_datetime(frame["time"].astype("float64"), unit="s", utc=True)
    return frame


def trajectory_frame(rows: Iterable[TrajectoryRow]) -> pd.DataFrame:
    """One row per trajectory, its messages as they were; a metric or metadata it has not is NaN or None."""
    import pandas as pd

    base = "step split group trajectory reward stop_reason turns completion_tokens first_text last_text messages"
    out = []
    for step, split, head, record in rows:
        fields = record["fields"]
        items = fields["messages_and_choices"]
        histories = [items, *(h["messages_and_choices"] for h in fields["additional_histories"])]
        choices = [item["choice"] for history in histories for item in history if "choice" in item]
        messages = [message_of(item) for item in items]
        error = fields["error"]
        reward = fields["reward"]
        row: dict[str, Any] = {
            "step": step,
            "split": split,
            "group": record["group"],
            "trajectory": record["trajectory"],
            "reward": float("nan") if reward is None else float(reward),
            "stop_reason": fields["stop_reason"],
            "turns": len(choices),
            "completion_tokens": sum(token_count(choice) for choice in choices),
            "first_text": text_of(messages[0]) if messages else "",
            "last_text": text_of(messages[-1]) if messages else "",
            "messages": messages,
            "error": f"{error['type']}: {error['message']}" if error else None,
            "logs": fields["logs"],
        }
        row.update({f"metric/{name}": value for name, value in fields["metrics"].items()})
        row.update({f"meta/{name}": value for name, value in fields["metadata"].items()})
        if head is not None:
            row.update({f"group_meta/{name}": value for name, value in head["metadata"].items()})
        out.append({_shown(name): _shown(value) for name, value in row.items()})
    if not out:
        return pd.DataFrame(columns=[*base.split(), "error", "logs"])
    return pd.DataFrame(out).sort_values(["step", "split", "group", "trajectory"], ignore_index=True)


def _shown(value: Any) -> Any:
    """A text that a frame can hold: pandas' text columns are UTF-8, which has no form for half of an emoji."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def message_of(item: Mapping[str, Any]) -> dict[str, Any]:
    if "choice" in item:
        return {"role": "assistant", **item["choice"].get("message", {})}
    return dict(item["message"])


def token_count(choice: Mapping[str, Any]) -> int:
    """Sampled tokens of a choice: by its ids, or, from another server, by its log-probs."""
    if isinstance(ids := choice.get("token_ids"), list):
        return len(ids)
    return len((choice.get("logprobs") or {}).get("content") or [])


def text_of(message: Mapping[str, Any]) -> str:
    """A message's content as text; of a list of parts the text parts."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(p["text"] for p in content if isinstance(p, Mapping) and isinstance(p.get("text"), str))
    return "" if content is None else str(content)
