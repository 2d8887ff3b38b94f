"""``python -m torchsbp`` runs the command ``torchsbp``."""

import sys

from .cli.main import main

sys.exit(main())
