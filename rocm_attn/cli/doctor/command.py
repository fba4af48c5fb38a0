"""`rocm-attn doctor`: finds faults of this installation or this machine, and says how to fix them."""

import argparse
import json
import os
from collections import Counter
from collections.abc import Sequence

from rocm_attn.cli.doctor.finding import Finding, Severity
from rocm_attn.cli.doctor.reading import read_machine
from rocm_attn.cli.doctor.registry import diagnose
from rocm_attn.errors import RocmAttnError

_MARKS = {Severity.OK: "ok", Severity.SKIPPED: "-", Severity.WARNING: "WARNING", Severity.PROBLEM: "PROBLEM"}
_MARK_WIDTH = max(map(len, _MARKS.values()))


class ProblemsFound(RocmAttnError):
    """The doctor has found problems; they are printed already."""


def run(options: argparse.Namespace) -> None:
    """Prints a finding for each check. Raises ProblemsFound if one is a problem; warnings alone do not raise."""
    findings = diagnose(read_machine(os.environ), at_build=options.at_build)
    if options.json:
        print(json.dumps([finding.as_dict() for finding in findings], indent=2))
    else:
        print("\n".join(lines(findings)))
    num_problems = Counter(finding.severity for finding in findings)[Severity.PROBLEM]
    if num_problems:
        raise ProblemsFound(f"{num_problems} problem{'s' if num_problems > 1 else ''} found")


def lines(findings: Sequence[Finding]) -> list[str]:
    """A line for each finding, followed by a line with its fix."""
    width = max(len(finding.check.id) for finding in findings)
    text = []
    for finding in findings:
        text.append(f"{_MARKS[finding.severity]:{_MARK_WIDTH}}  {finding.check.id:{width}}  {finding.verdict.found}")
        if finding.verdict.fix:
            text.append(f"{'':{_MARK_WIDTH}}  {'':{width}}  fix: {finding.verdict.fix} ({finding.check.report})")
    return text
