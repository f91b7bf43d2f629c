"""python -m dejavu_train.quantize --model MODEL --output FOLDER [--option value ...]"""

import os
import sys
from collections.abc import Sequence

if __name__ == "__main__":
    # Before torch is loaded: waiting threads sleep. Where cores are shared, spinning ones cost more than they save.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

    from dejavu_train.errors import NOTHING_KEPT, exit_on_user_error

    def main(argv: Sequence[str] | None) -> None:
        from dejavu_train.quantize.command import main

        main(argv)

    sys.exit(exit_on_user_error(main, after_signal=NOTHING_KEPT))
