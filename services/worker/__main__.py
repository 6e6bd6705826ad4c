"""``python -m services.worker`` is ``orca worker``: the only module of a service that knows the command line."""

import sys

from services.cli.main import main

if __name__ == "__main__":
    main(["worker", *sys.argv[1:]])
