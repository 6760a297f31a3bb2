"""`python -m evogrpo` is the same as `evogrpo`."""

import sys
from pathlib import Path

# `-m` puts the working directory before everything else, where a file called like any package would be imported in its
# place; the commands that run code of the user's look there in the end.
if not sys.flags.safe_path and not (Path(sys.path[0]) / "evogrpo" / "cli").is_dir():
    del sys.path[0]

from evogrpo.cli.main import main

sys.exit(main())
