"""A decode node as a process: `python -m decode_node`, the same as `pdserve decode`."""

import sys

from deploy.cli import main

if __name__ == "__main__":
    sys.exit(main(["decode", *sys.argv[1:]]))
