"""``python -m fa2_numba`` is ``fa2-numba``."""

import sys

from fa2_numba.cli import main

if __name__ == "__main__":
    sys.exit(main())
