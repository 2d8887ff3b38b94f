"""``python -m torchsbp.train RECIPE …``: the command ``torchsbp train``, also for ``torchrun -m``."""

import sys

from ..cli.main import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
