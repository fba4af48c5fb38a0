"""`rocm-attn replay-step --simulate`: the cause of a wrong layer, from the evidence that a server left."""

import argparse
import json
from pathlib import Path

from rocm_attn.errors import RocmAttnError
from rocm_attn.watch.evidence import StepEvidence
from rocm_lab.simulator.evidence import Cause, judge
from rocm_lab.waits.objects import OBJDUMPS


class WrongResult(RocmAttnError):
    """The recorded result is wrong, and its cause is known."""


def run(options: argparse.Namespace) -> None:
    """Prints the cause and what it rests on. Raises WrongResult after that, BadSetting for another file."""
    path = Path(options.dump)
    evidence = StepEvidence.read(path)
    judgement = judge(evidence, path, (options.objdump,) if options.objdump else OBJDUMPS)
    launches = [f"{each.sha256[:12]} {each.arch} {each.name}" for each in evidence.launches]
    if options.json:
        found = {"finding": evidence.finding, "launches": launches, "cause": judgement.cause.name.lower()}
        print(json.dumps({**found, "because": judgement.lines}, indent=2))
    else:
        print("\n".join((evidence.finding, *launches, *judgement.lines, f"the cause: {judgement.cause.value}")))
    if judgement.cause is not Cause.NONE:
        raise WrongResult(f"{evidence.finding}: {judgement.cause.value}")
