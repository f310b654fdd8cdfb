"""``python -m lockstep``: the command, as torchrun starts it."""

import sys

from lockstep.cli import main

sys.exit(main())
