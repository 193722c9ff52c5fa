"""`python -m pagedattn` is the command line."""

import sys

from pagedattn.cli import main

sys.exit(main())
