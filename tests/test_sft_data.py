"""Training data out of files, data sets and dicts: what is read, and what is said about what cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from artnb.errors import ConfigError, DataError
from artnb.training.sft_data import JsonlFile, read_trajectories
from artnb.trajectories import Trajectory, TrajectoryGroup

ROW = {"messages": [{"role": "user", "content": "한글?"}, {"role": "assistant", "content": "안녕 👋"}]}
TOOL = {"type": "function", "function": {"name": "ping", "parameters": {"type": "object", "properties": {}}}}
CALLS = {
    "messages": [
        {"role": "user", "content": "ping"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "ping", "arguments": '{"x": null}'}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "pong"},
        {"role": "assistant", "content": "pong", "weight": 1},
    ],
    "tools": [TOOL],
}


def write(path: Path, *lines: Any) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) for line in lines]
    path.write_text("\n".join(texts), encoding="utf-8")
    return path


def test_a_file_is_read_row_by_row_with_its_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl", "", ROW, "  ", CALLS, "")
    rows = JsonlFile(path)
    assert len(rows) == 2
    assert rows[0].messages() == ROW["messages"]
    assert [(row.metadata, row.reward) for row in rows] == [
        ({"source": "train.jsonl", "line": 2}, None),
        ({"source": "train.jsonl", "line": 4}, None),
    ]
    assert rows[-1].tools == [TOOL] and rows[1].messages()[1]["tool_calls"] == CALLS["messages"][1]["tool_calls"]
    assert [row.metadata["line"] for row in rows[::-1]] == [4, 2]
    with pytest.raises(IndexError):
        rows[2]
    assert rows.sha256 != JsonlFile(write(tmp_path / "other.jsonl", ROW)).sha256


def test_a_byte_order_mark_and_windows_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "windows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(json.dumps(row).encode() for row in (ROW, CALLS)) + b"\r\n")
    assert [row.metadata["line"] for row in JsonlFile(path)] == [1, 2]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"messages": [', r"line 2 is not JSON: .* at column \d+: '\{\"messages\": \['"),
        ('{"messages": [{"role": "user", "content": "x" "y"}]}', r"is not JSON: Expecting ',' delimiter at column 47"),
        ("[1, 2]", "line 2 is a list, not an object like"),
        ("3", "line 2 is a int"),
        ("{}", 'line 2 has no "messages"'),
        ('{"mesages": []}', "has no \"messages\"; did you mean 'mesages'"),
        ('{"conversations": [{"from": "human", "value": "x"}]}', 'has no "messages"; known: conversations'),
        ('{"messages": "hello"}', "cannot be used: messages must be a list of messages, not str"),
        ('{"messages": []}', "messages is empty"),
        ('{"messages": [{"content": "x"}]}', r"messages\[0\] has no role"),
        ('{"messages": ["x"]}', r"messages\[0\] must be a mapping, not str"),
        (
            '{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}',
            r"messages\[0\] has a part of type 'image_url'; only text",
        ),
        (
            '{"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}',
            r"messages\[0\].tool_calls\[0\] has no function name",
        ),
        ('{"messages": [{"role": "user", "content": "x"}], "tools": [{"name": "x"}]}', r"tools\[0\] must be"),
        ('{"messages": [{"role": "user", "content": "x"}], "tools": "[{"}', '"tools" that are text but not JSON'),
        (
            '{"messages": [{"role": "assistant", "content": "x", "weight": 0.5}]}',
            r"messages\[0\] with weight=0.5; it can be 0",
        ),
        ('{"messages_and_choices": 3}', "is not a saved trajectory: messages_and_choices"),
        ("[" * 100_000, "line 2 is nested too deeply"),
    ],
)
def test_a_wrong_line_is_named_with_its_file_and_what_is_wrong(tmp_path: Path, line: str, said: str) -> None:
    path = write(tmp_path / "train.jsonl", ROW, line, ROW)
    with pytest.raises(DataError, match=said) as caught:
        JsonlFile(path)
    assert str(caught.value).startswith(f"{path}: 1 of 3 rows cannot be used: line 2 ")
    assert str(caught.value).endswith("Nothing was trained")
    assert isinstance(caught.value, ValueError)


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(b'{"messages": "\xff\xfe"}\n')
    with pytest.raises(DataError, match="line 1 is not UTF-8 at byte 14"):
        JsonlFile(path)


def test_many_wrong_lines_are_counted_and_the_first_are_told(tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl", *[ROW, "{"] * 20)
    with pytest.raises(DataError) as caught:
        read_trajectories(path)
    text = str(caught.value)
    assert (
        "20 of 40 rows cannot be used" in text and "line 2 " in text and "line 10 " in text and "line 12 " not in text
    )
    assert "; 15 more. " in text


def test_files_that_hold_nothing_or_something_else(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere\.jsonl cannot be read: No such file"):
        read_trajectories(tmp_path / "nowhere.jsonl")
    with pytest.raises(DataError, match="cannot be read: Is a directory"):
        read_trajectories(tmp_path)
    with pytest.raises(DataError, match="holds no rows"):
        read_trajectories(write(tmp_path / "empty.jsonl", "", "\t"))
    with pytest.raises(DataError, match="holds a JSON array; a JSONL file has one object a line"):
        read_trajectories(write(tmp_path / "train.json", json.dumps([ROW], indent=1)))


def test_a_file_that_changes_while_it_is_read_says_so(tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl", ROW, ROW)
    rows = JsonlFile(path)
    write(path, "x" * 20, "y" * 2000)
    with pytest.raises(DataError, match="has changed since it was opened: line 2"):
        rows[1]


def test_rows_trajectories_groups_and_files_mixed(tmp_path: Path) -> None:
    path = write(tmp_path / "more.jsonl", CALLS)
    mine = Trajectory(messages_and_choices=ROW["messages"], reward=0.5)
    saved = json.loads(mine.model_dump_json())
    read = read_trajectories(iter([ROW, mine, TrajectoryGroup([mine, mine]), str(path), saved]))
    assert read[1] is mine and read[2] is mine and mine.metadata == {}
    assert [row.metadata for row in read] == [{"row": 0}, {}, {}, {}, {"source": "more.jsonl", "line": 1}, {"row": 4}]
    assert read[5].messages() == mine.messages() and read[5].reward == 0.5
    assert read_trajectories([]) == []


def test_the_callers_rows_are_left_alone() -> None:
    row = json.loads(json.dumps(CALLS))
    read_trajectories([row])[0].messages_and_choices[0]["content"] = "changed"  # type: ignore[index]
    assert row == CALLS


def test_what_is_no_data_says_what_to_give() -> None:
    with pytest.raises(ConfigError, match=r"a mapping with train, test was given; give one of its parts.*'train'"):
        read_trajectories({"train": [ROW], "test": [ROW]})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"one row was given; give a list of rows, \[row\]"):
        read_trajectories(ROW)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="not a int"):
        read_trajectories(3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="not a Trajectory"):
        read_trajectories(Trajectory())  # type: ignore[arg-type]
    with pytest.raises(DataError, match="the data: 1 of 2 rows cannot be used: row 1 is a NoneType"):
        read_trajectories([ROW, None])  # type: ignore[list-item]


def test_data_sets_of_the_datasets_library(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [
        {**ROW, "tools": json.dumps([TOOL]), "id": 1},
        {"messages": [{"role": "user", "content": "x"}, {**CALLS["messages"][1]}], "tools": "", "id": 2},
    ]
    data = datasets.Dataset.from_list(rows)
    assert data[0]["messages"][0]["tool_calls"] is None, "Arrow fills what a row does not have"
    read = read_trajectories(data)
    assert read[0].messages() == ROW["messages"] and read[0].tools == [TOOL] and read[1].tools is None
    assert read[1].messages()[1]["tool_calls"][0]["function"] == {"name": "ping", "arguments": '{"x": null}'}
    streamed = read_trajectories(data.to_iterable_dataset())
    assert [row.messages() for row in streamed] == [row.messages() for row in read]
    with pytest.raises(ConfigError, match=r"give one of its parts, such as data\['train'\]"):
        read_trajectories(datasets.DatasetDict({"train": data}))
    with pytest.raises(DataError, match='row 0 has no "messages"'):
        read_trajectories(datasets.Dataset.from_dict({"text": ["x"]}))
