"""`python -m lowmem.plan`: see lowmem/run/plan_command.py.

Nothing imports this file: a submodule of this name would hide the function `lowmem.plan`.
"""

import sys

from lowmem.run.plan_command import main

if __name__ == "__main__":
    sys.exit(main())
