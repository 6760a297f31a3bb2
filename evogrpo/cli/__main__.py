"""`python -m evogrpo.cli` is the same as `evogrpo`."""

import sys

from evogrpo.cli.arguments import main

sys.exit(main())
