"""`python -m meshtrain.doctor CONFIG`; under torchrun where all nodes have met."""

import argparse
import os
import sys

from meshtrain.doctor.command import add_arguments, run
from meshtrain.errors import InputError
from meshtrain.job.environment import tell_launcher
from meshtrain.job.signals import end_with_launcher
from meshtrain.job.storage import print_error


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="meshtrain.doctor", description=__doc__, allow_abbrev=False
    )
    add_arguments(parser)
    try:
        return run(parser.parse_intermixed_args())
    except InputError as error:
        print_error(error)
        tell_launcher(str(error))
        return 2


if __name__ == "__main__":
    end_with_launcher(os.environ)
    sys.exit(main())
