"""The router as a process: `python -m router`, the same as `pdserve router`."""

import sys

from deploy.cli import main

if __name__ == "__main__":
    sys.exit(main(["router", *sys.argv[1:]]))
