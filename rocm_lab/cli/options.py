"""The options of the laboratory's commands, each written once. Imports only the standard library."""

from rocm_attn.cli.options import option, positive, switch

DUMP = option("dump", metavar="DUMP", help="file from a flight recorder, or a server's .evidence file")
REPORT = option("report", metavar="REPORT.json", help="file that `bash scripts/test.sh rocm` wrote")
FOLDER = option("--folder", default="first_run", help="folder for the written files (first_run)")
SCRIPT = option("script", metavar="FILE.py", help="script that launches Triton kernels on CPU tensors")
STEP = option("--step", type=int, metavar="N", help="number of the step (the last one)")
STEPS = option("--steps", type=positive, default=2000, metavar="N", help="steps to run (2000)")
SHAPES = option(
    "--shapes",
    metavar="BATCH,...",
    help="steps to tune for, in the notation of `bench kernels --batch`, as in 64d4k,1x2048+6144 (decode, prefill "
    "chunks, and drafts)",
)
SECONDS = option(
    "--seconds",
    type=positive,
    default=600,
    metavar="S",
    help="seconds after which no further candidate is started (600)",
)
OUTPUT = option(
    "--output",
    metavar="FILE",
    help="file for the results (the file in ROCM_ATTN_TUNING, else tuning.json in the cache)",
)
JOBS = option("--jobs", type=positive, metavar="N", help="processes that compile (all cores but one)")
SIMULATE = switch("--simulate", "DUMP is a server's .evidence file: run its machine code on a CPU and name the cause")
DRY_RUN = switch("--dry-run", "list the candidates without running them; needs no GPU")
WAVES = option("--waves", type=positive, default=2, metavar="N", help="waves per SIMD (2)")
NUM_WARPS = option("--num-warps", type=positive, default=8, metavar="N", help="waves per program (8)")
OBJDUMP = option("--objdump", metavar="FILE", help="llvm-objdump that supports the code objects' arch (searched for)")
FILES = option(
    "files",
    nargs="+",
    metavar="FILE",
    help="Triton's assembly (.amdgcn), a code object (.hsaco, .co; needs llvm-objdump), or a directory",
)
