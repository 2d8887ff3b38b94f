"""``python -m torchsbp.train RECIPE …``: the command ``torchsbp train``, also for ``torchrun -m``."""

import sys

from .cli import train

if __name__ == "__main__":
    sys.exit(train(sys.argv[1:]))
