"""A prefill node as a process: `python -m prefill_node`, the same as `pdserve prefill`."""

import sys

from deploy.cli import main

if __name__ == "__main__":
    sys.exit(main(["prefill", *sys.argv[1:]]))
