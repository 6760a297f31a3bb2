"""`python -m evogrpo` is the same as `evogrpo`."""

import sys
from pathlib import Path

# `-m` puts the working directory first on the path, where a file could shadow any package. Commands
# that run the user's code append the directory to the path themselves. It stays if evogrpo is
# imported from it, as in a checkout.
if not sys.flags.safe_path and not (Path(sys.path[0]) / "evogrpo" / "cli").is_dir():
    del sys.path[0]

from evogrpo.cli.main import main

sys.exit(main())
