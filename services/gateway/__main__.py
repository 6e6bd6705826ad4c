"""``python -m services.gateway`` is ``orca gateway``: the only module of a service that knows the command line."""

import sys

from services.cli.main import main

if __name__ == "__main__":
    main(["gateway", *sys.argv[1:]])
