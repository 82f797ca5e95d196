"""``python -m fedjax_lab``."""

import sys

from fedjax_lab.command.cli import main

if __name__ == "__main__":
    sys.exit(main())
