"""`python -m meshtrain.cli`: the console script, for when its folder is not on the PATH."""

import sys

from meshtrain.cli.main import main

sys.exit(main())
