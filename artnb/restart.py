"""Notice that an install cell replaced a package under a running kernel, and say the one thing that helps.

Looks only at modules that are already imported. Repairs nothing.
"""

from __future__ import annotations

import sys

PACKAGES = {
    "numpy": "numpy",
    "pandas": "pandas",
    "PIL": "pillow",
    "openai": "openai",
    "pydantic": "pydantic",
    "torch": "torch",
    "transformers": "transformers",
    "peft": "peft",
    "IPython": "ipython",
}
"""Module → distribution, for those whose module says its version."""


def replaced() -> list[str]:
    """One entry for each imported package whose files on disk are of another version: `numpy (1.26.4 → 2.4.6)`."""
    loaded = {name: getattr(sys.modules.get(name), "__version__", None) for name in PACKAGES}
    if not any(loaded.values()):
        return []
    from importlib import metadata

    found = []
    for name, version in loaded.items():
        if not isinstance(version, str):
            continue
        try:
            installed = metadata.version(PACKAGES[name])
        except metadata.PackageNotFoundError:  # a module without a distribution, e.g. from a source tree
            continue
        # torch says 2.13.0+cu128 where its distribution may say 2.13.0.
        if version.partition("+")[0] != installed.partition("+")[0]:
            found.append(f"{PACKAGES[name]} ({version} → {installed})")
    return found


def warn_if_replaced() -> None:
    """Say so in one line on standard error; nothing where nothing was replaced.

    Reported for notebooks: https://github.com/unslothai/unsloth/issues/2077, https://github.com/OpenPipe/ART/issues/449
    """
    if (found := replaced()) and sys.stderr is not None:
        print(
            f"artnb: restart the runtime (Runtime → Restart session), then run all cells: {', '.join(found)} "
            "changed on disk after this kernel had imported it",
            file=sys.stderr,
            flush=True,
        )
