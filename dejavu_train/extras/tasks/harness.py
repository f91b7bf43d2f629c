"""lm-eval's own command line with the model ``dejavu``: python -m dejavu_train.extras.tasks.harness run --model
dejavu --model_args pretrained=FOLDER,predictors=BUNDLE,mlp_density=0.1 --tasks piqa --log_samples --output_path OUT

Tasks from local files: ``--include_path configs/tasks --tasks local_piqa --metadata '{"folder": "FOLDER"}'``.
"""

import sys
from collections.abc import Sequence

from lm_eval.__main__ import cli_evaluate

from dejavu_train.extras.tasks import model  # noqa: F401  registers the model
from dejavu_train.ground.errors import exit_on_user_error


def main(argv: Sequence[str] | None = None) -> None:
    """lm-eval reads the arguments of the process."""
    if argv is not None:
        sys.argv[1:] = argv
    cli_evaluate()


if __name__ == "__main__":
    sys.exit(exit_on_user_error(main))
