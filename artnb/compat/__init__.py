"""For code that was written for OpenPipe's ART: `import art` gives artnb, when asked.

    import artnb.compat
    artnb.compat.install()
    import art                                # artnb, and so are art.local, art.rewards, …
    from art.local import LocalBackend

Or, without a change to the script: `python -m artnb.compat train.py`. What differs on purpose is in differences.py and
docs/compatibility.md; an option of ART's that artnb cannot honour raises.
"""

from .alias import install, installed, uninstall

__all__ = ["install", "installed", "uninstall"]
