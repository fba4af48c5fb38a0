"""A command of a distribution that is not installed."""

import argparse

from rocm_attn.errors import BadSetting
from rocm_attn.machine.distributions import installing


def run(options: argparse.Namespace) -> None:
    """Refuses the command. Raises BadSetting."""
    distribution = options.folder.replace("_", "-")
    raise BadSetting(
        f"{options.command} is a command of {distribution}, which is not installed; {installing(options.folder)}"
    )
