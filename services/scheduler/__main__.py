"""``python -m services.scheduler`` is ``orca scheduler``: the only module of a service that knows the command line."""

import sys

from services.cli.main import main

if __name__ == "__main__":
    main(["scheduler", *sys.argv[1:]])
