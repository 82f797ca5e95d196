"""``python -m fedjax_lab``."""

import sys

from fedjax_lab.machine.extras import install_missing

if __name__ == "__main__":
    try:
        from fedjax_lab.command.cli import main
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("fedjax_lab"):
            raise
        sys.exit(f"fedjax_lab needs the package {error.name}: `{install_missing()}`.")
    sys.exit(main())
