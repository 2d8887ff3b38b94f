"""``python -m torchsbp`` is the command ``torchsbp``."""

import sys

from .cli import main

sys.exit(main())
