from __future__ import annotations

from pathlib import Path

import pytest
import torch

from artnb.errors import CheckpointError
from artnb.training.state_file import read_state, write_state


def test_a_state_comes_back_as_it_was(tmp_path: Path) -> None:
    state = {
        "optimizer": {"names": ["a.b", "c"], "scale": 1.5, "updates": 3.0, "exp_avg": torch.randn(7)},
        "generator": torch.Generator().manual_seed(3).get_state(),
        "nonfinite_in_a_row": 0,
    }
    write_state(state, tmp_path / "state")
    read = read_state(tmp_path / "state")
    assert torch.equal(read["generator"], state["generator"])
    assert torch.equal(read["optimizer"].pop("exp_avg"), state["optimizer"].pop("exp_avg"))
    assert {k: v for k, v in read.items() if k != "generator"} == {k: v for k, v in state.items() if k != "generator"}


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 not safetensors", b"\x02\0\0\0\0\0\0\0{}"])
def test_a_file_of_another_kind_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "state").write_bytes(content)
    with pytest.raises(CheckpointError, match="state cannot be read as a trainer's state"):
        read_state(tmp_path / "state")
