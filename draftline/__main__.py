"""``python -m draftline`` is the command ``draftline``."""

import sys

from draftline.cli import main

sys.exit(main())
