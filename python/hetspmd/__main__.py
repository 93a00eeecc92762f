"""``python -m hetspmd`` is the command ``hetspmd``."""

from __future__ import annotations

import sys

from hetspmd.cli.main import main

sys.exit(main())
