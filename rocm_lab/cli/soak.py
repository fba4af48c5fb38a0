"""`rocm-attn soak`: random steps of a tiny model, every output compared with the reference."""

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from rocm_attn.cli.arguments import device_named
from rocm_attn.cli.signals import sigterm_interrupts
from rocm_attn.cli.streams import say
from rocm_attn.errors import BadSetting
from rocm_lab.bench.machine import describe_machine
from rocm_lab.soak.scenario import LONG_KV_LEN, SHORT_KV_LEN, Scenario
from rocm_lab.soak.soak import Soak, SoakFailed, SoakFault, SoakInterrupted, SoakReport


def run(options: argparse.Namespace) -> None:
    """Prints a summary of the steps, so far after an interrupt, or the finding. Raises SoakFailed at the first one."""
    device = device_named(options.device)
    dtype_name = options.dtype or ("float32" if device.type == "cpu" else "bfloat16")
    if options.speculative and options.deterministic:
        raise BadSetting("--deterministic has no kernels for trees of drafts, which --speculative needs; leave one out")
    if options.speculative and options.recurrent:
        raise BadSetting("--speculative drafts trees, and states of --recurrent go on token after token; leave one out")
    scenario = Scenario.of_seed(options.seed, LONG_KV_LEN if options.deterministic else SHORT_KV_LEN)
    scenario = scenario.speculative() if options.speculative else scenario
    scenario = scenario.with_states() if options.recurrent else scenario
    soak = Soak(
        scenario.in_order() if options.deterministic else scenario,
        seed=options.seed,
        device=device,
        provider=options.provider,
        dtype=getattr(torch, dtype_name),
    )
    machine = describe_machine()  # before the soak: the checkout may move while it runs
    try:
        with sigterm_interrupts():
            report = soak.run(options.steps, lambda steps: say(f"{steps} steps"))
    except SoakInterrupted as interrupt:
        _print(options, machine, interrupt.report)
        raise
    except SoakFailed as failure:
        again = _command(options, failure.finding, device, dtype_name)
        if options.json:
            print(json.dumps({"finding": asdict(failure.finding), "again": again}))
        say(f"run it again with: {again}")
        raise
    _print(options, machine, report)


def _print(options: argparse.Namespace, machine: Mapping[str, Any], report: SoakReport) -> None:
    print(json.dumps({"machine": machine, "report": report.as_dict()}, indent=1) if options.json else report)


def _command(options: argparse.Namespace, finding: SoakFault, device: torch.device, dtype_name: str) -> str:
    """The shortest soak command that reproduces the finding."""
    return (
        f"rocm-attn soak --steps {finding.step} --seed {options.seed} --device {device} "
        f"--provider {options.provider} --dtype {dtype_name}"
        + (" --deterministic" if options.deterministic else "")
        + (" --speculative" if options.speculative else "")
        + (" --recurrent" if options.recurrent else "")
    )
