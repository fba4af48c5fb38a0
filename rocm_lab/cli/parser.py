"""The arguments of the laboratory's commands. Nothing here imports torch, so that --help is instant."""

from __future__ import annotations  # argparse's Commands takes no parameter at run time

import argparse

from rocm_attn.cli import options as a
from rocm_attn.cli.parser import Commands, add_command, add_options
from rocm_lab.cli import options as o
from rocm_lab.cli.bench_parser import add_bench

_SOAK_EXAMPLES = """\
examples:
  rocm-attn soak --steps 2000
  rocm-attn soak --steps 20000 --seed 7 --device cuda --json > soak.json
  rocm-attn soak --speculative --steps 13500
  rocm-attn soak --recurrent --steps 2000
"""

_TUNE_EXAMPLES = """\
examples:
  rocm-attn tune ./Llama-3.1-8B-Instruct --dry-run --arch gfx942        the candidates, without a GPU
  rocm-attn tune ./Llama-3.1-8B-Instruct --seconds 1800
  rocm-attn tune config.json --tp 8 --shapes 64d4k,256d2k,1x2048+8k --output tuning.json
  rocm-attn tune 32x8x128 --page-size 64 --json > tuned.json            32 query heads over 8 KV heads of 128
"""

_SIMULATE_EXAMPLES = """\
examples:
  rocm-attn simulate check_softmax.py
  rocm-attn simulate check_softmax.py --arch gfx950 --json
"""

_READ_REPORT_EXAMPLES = """\
examples:
  rocm-attn read-report reports/rocm-node7-20261126-101500.json
  rocm-attn read-report report.json --arch mi355x --triton-release 3.6.0 --folder from_mi355x
"""

_CYCLES_EXAMPLES = """\
examples:
  rocm-attn cycles ~/.triton/cache                                       everything that Triton compiled
  rocm-attn cycles fmha_fwd.co --waves 2 --num-warps 8 --json
"""

_WAITS_EXAMPLES = """\
examples:
  rocm-attn waits ~/.triton/cache                                        everything that Triton compiled
  rocm-attn waits fmha_fwd.co --json
"""


def add_commands(commands: Commands[argparse.ArgumentParser]) -> None:
    """Adds the laboratory's commands to `rocm-attn`."""
    adders = _add_tune, _add_cycles, _add_read_report, _add_replay_step, _add_simulate, _add_soak, _add_waits
    for add in (*adders, add_bench):
        add(commands)


def _add_tune(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = add_command(
        commands,
        "tune",
        help="search for faster tiles for a model's layers on this GPU",
        description="Try other tiles of the project's Triton kernels for a model's layers, compare each with the "
        "reference and with the tiles in use, and write faster ones to a file that runtimes read.",
        examples=_TUNE_EXAMPLES,
    )
    parser.set_defaults(module="rocm_lab.tune.command")
    config = a.CONFIG.but(
        metavar="CONFIG.json|QxKVxDIM",
        help="a model's config.json, its directory, a .gguf file, a Hugging Face id, or query heads x KV heads x "
        "head dim, as in 32x8x128",
    )
    arch = a.ARCH.but(help="with --dry-run: gfx942 (MI300X), gfx950 (MI355X), sm_90 or sm_80 (gfx942)")
    model = (config, a.RANKS, a.DTYPE, *a.KV_FORMAT, *a.PAGES, a.PROVIDER, a.MAX_KV_LEN)
    add_options(parser, (*model, o.SHAPES, o.SECONDS, o.OUTPUT, o.JOBS, a.DEVICE, arch, o.DRY_RUN, a.JSON))


def _add_read_report(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = add_command(
        commands,
        "read-report",
        help="read the report of a first run on an AMD GPU: tiles, and differences from the simulator; needs no GPU",
        description="Read the report of the first run on an AMD GPU. Write tuning.json with tiles that were measured "
        "to be faster, and differences.json with differences from the simulator and from the compiler's "
        "figures.",
        examples=_READ_REPORT_EXAMPLES,
    )
    parser.set_defaults(module="rocm_lab.cli.read_report")
    arch = a.ARCH.but(default="gfx942", help="arch or GPU's name, which must be the report's (gfx942)")
    triton = a.TRITON_RELEASE.but(help="Triton release, which must be the report's (the installed one)")
    add_options(parser, (o.REPORT, arch, triton, o.FOLDER, o.OBJDUMP, a.JSON))


def _add_replay_step(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = add_command(
        commands,
        "replay-step",
        help="replay a step of a flight recorder's dump and compare the results",
        description="Rebuild one step of a dump, with its lengths, rows and sizes and with random K and V; run it "
        "eagerly, as a graph and with the float64 reference. Exit code 1 if the results differ. With "
        "--simulate, find the cause of a wrong result that a server has recorded: kernel, compiler, or "
        "hardware.",
    )
    parser.set_defaults(module="rocm_lab.cli.replay_step")
    provider = a.PROVIDER.but(default=None, help="provider of attention kernels (the dump's)")
    seed = a.SEED.but(help="seed of the random K and V (0)")
    add_options(parser, (o.DUMP, o.STEP, seed, a.DEVICE, provider, o.SIMULATE, o.OBJDUMP, a.JSON))


def _add_simulate(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = add_command(
        commands,
        "simulate",
        help="run a script whose Triton kernels are executed as AMD machine code; needs no GPU",
        description="Run a Python script that launches Triton or Gluon kernels on CPU tensors. Each kernel is "
        "compiled for gfx942 and gfx950, and its machine code is executed on the CPU, with every address "
        "checked. Print its registers, LDS, waves and instructions. Exit code 1 if the script fails or a "
        "kernel does not wait for data that it uses.",
        examples=_SIMULATE_EXAMPLES,
    )
    parser.set_defaults(module="rocm_lab.cli.simulate")
    arch = a.ARCH.but(help="gfx942 or gfx950 (both, one after the other)")
    add_options(parser, (o.SCRIPT, arch, a.JSON))


def _add_soak(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = add_command(
        commands,
        "soak",
        help="run random steps of a tiny model and compare every output with the reference",
        description="Run random requests that arrive, grow, share pages, run out of pages and end, with graphs on, "
        "and compare every output of every step with a float64 reference. Stop with exit code 1 at the first "
        "difference.",
        examples=_SOAK_EXAMPLES,
    )
    parser.set_defaults(module="rocm_lab.cli.soak")
    seed = a.SEED.but(help="seed of everything random; the same seed gives the same steps (0)")
    dtype = a.DTYPE.but(default=None, help="dtype of q, k, v and the KV cache (bfloat16 on a GPU, float32 on a CPU)")
    deterministic = a.DETERMINISTIC.but(
        help="soak deterministic mode: some sequences are compared bitwise with the same sequences run alone"
    )
    json = a.JSON.but(help="print one JSON object with the steps, or with the difference found")
    speculative = a.switch("--speculative", "mostly draft and verify: rounds, chains, trees, and rejected drafts")
    recurrent = a.switch("--recurrent", "with recurrent layers: checkpoints of prefixes, drafts that are taken back")
    add_options(parser, (o.STEPS, seed, a.DEVICE, a.PROVIDER, dtype, deterministic, speculative, recurrent, json))


def _add_cycles(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = add_command(
        commands,
        "cycles",
        help="count clocks of the hot loops of compiled kernels for gfx942 and gfx950; needs no GPU",
        description="Simulate the instruction issue of the innermost loop with the most matrix instructions, by the "
        "rules of CDNA3 and CDNA4, and print its clocks and its share of the matrix units' peak.",
        examples=_CYCLES_EXAMPLES,
    )
    parser.set_defaults(module="rocm_lab.cli.cycles")
    add_options(parser, (o.FILES, o.WAVES, o.NUM_WARPS, o.OBJDUMP, a.JSON))


def _add_waits(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = add_command(
        commands,
        "waits",
        help="check compiled kernels for gfx942 and gfx950 for missing waits and no-ops; needs no GPU",
        description="Prove for every path of a kernel that it waits for loads, stores and matrix instructions in "
        "flight before it uses their registers and LDS. Exit code 1 if a kernel has a fault.",
        examples=_WAITS_EXAMPLES,
    )
    parser.set_defaults(module="rocm_lab.cli.waits")
    add_options(parser, (o.FILES, o.OBJDUMP, a.JSON))
