"""`rocm-attn guards`: the safeguards, what each prevents and whether it is on."""

import argparse
import json

from rocm_attn.guards.registry import GUARDS, guards_from_settings
from rocm_attn.machine.settings import DEBUG, DISABLE_GUARDS


def run(options: argparse.Namespace) -> None:
    """Prints the safeguards as the environment sets them. Raises BadSetting."""
    listed = safeguards()
    if options.json:
        print(json.dumps(listed, indent=2))
        return
    width = max(len(str(guard["id"])) for guard in listed)
    for guard in listed:
        print(f"{guard['id']:{width}}  {'on ' if guard['on'] else 'OFF'}  {guard['prevents']} ({guard['report']})")
    off = [str(guard["id"]) for guard in listed if not guard["on"]]
    print(f"\nswitched off by {DISABLE_GUARDS}: {', '.join(off)}" if off else "\nall on")
    print(f"to debug without one: {DEBUG}=1 {DISABLE_GUARDS}=id[,id...]")


def safeguards() -> list[dict[str, object]]:
    """id, prevents, report, on and test of every safeguard. Raises BadSetting."""
    off = guards_from_settings().off
    return [
        {
            "id": guard.id,
            "prevents": guard.prevents,
            "report": guard.report,
            "on": guard.id not in off,
            "test": guard.test,
        }
        for guard in GUARDS
    ]
