"""Agreement: ranks that run one model in step must take the same kernels, and graphs of the same steps.

What a rank finds wrong with a kernel or a graph is true of its own device, driver and disk. Where the ranks of a model
go on with different ones, their collectives no longer meet. So each of them sends the others what it found, and all act
on everything that was found. Nothing is asked of other ranks while steps run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch.distributed

# What this rank found wrong, by name of the thing -> what some rank found wrong; called by every rank, equally often.
Agree = Callable[[Mapping[str, str]], Mapping[str, str]]


def alone(findings: Mapping[str, str]) -> Mapping[str, str]:
    """A model on one rank, or ranks that need not agree: what was found."""
    return findings


def among(group: torch.distributed.ProcessGroup) -> Agree:
    """All ranks of a group, which must be those that run one model in step: not those of another data-parallel replica,
    unless its forward meets theirs in a collective, as over shared experts.

    group: best one of Gloo, on CPUs: the findings are objects of Python
    """

    def agree(findings: Mapping[str, str]) -> Mapping[str, str]:
        of_rank: list[Mapping[str, str]] = [{} for _ in range(group.size())]
        torch.distributed.all_gather_object(of_rank, dict(findings), group=group)
        return found_by_any(of_rank)

    return agree


def found_by_any(findings_of_rank: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Everything that some rank found wrong, with the lowest such rank unless all of them say the same."""
    found: dict[str, str] = {}
    for rank, findings in enumerate(findings_of_rank):
        for name, reason in findings.items():
            everywhere = all(others.get(name) == reason for others in findings_of_rank)
            found.setdefault(name, reason if everywhere else f"on rank {rank}: {reason}")
    return found
