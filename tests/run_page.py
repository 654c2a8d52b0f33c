"""Run the Python blocks of a page of the documentation, in order, as one notebook: `python -P run_page.py PAGE MODEL`.

MODEL is a folder that stands in for the demo model. Prints how many blocks ran.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import artnb as art


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.S | re.M)


async def run(page: Path) -> int:
    scope: dict[str, Any] = {}
    blocks = python_blocks(page)
    for number, block in enumerate(blocks):
        code = compile(block, f"{page.name} block {number}", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        result = eval(code, scope)
        if inspect.iscoroutine(result):
            await result
    for model in [value for value in scope.values() if isinstance(value, art.TrainableModel)]:
        await model.backend().close()
    return len(blocks)


if __name__ == "__main__":
    page, stand_in = Path(sys.argv[1]), sys.argv[2]
    if stand_in != "demo":
        art.demo_model = lambda: stand_in
    print(f"{asyncio.run(run(page))} blocks of {page.name} ran")
