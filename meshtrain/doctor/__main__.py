"""`python -m meshtrain.doctor CONFIG`; under torchrun where all nodes have met."""

import argparse
import os
import sys

from meshtrain.doctor.command import add_arguments, run
from meshtrain.errors import InputError
from meshtrain.job.signals import end_with_launcher


def main() -> int:
    parser = argparse.ArgumentParser(prog="meshtrain.doctor", description=__doc__, allow_abbrev=False)
    add_arguments(parser)
    try:
        return run(parser.parse_intermixed_args())
    except InputError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    end_with_launcher(os.environ)
    sys.exit(main())
