"""python -m artnb.compat train.py: a script that was written for ART, on artnb."""

import sys

from .alias import run

if __name__ == "__main__":
    if sys.argv[1:] in ([], ["-m"]) or sys.argv[1] in ("-h", "--help"):
        sys.exit("usage: python -m artnb.compat SCRIPT [ARGUMENTS], or python -m artnb.compat -m MODULE [ARGUMENTS]")
    run(sys.argv[1:])
