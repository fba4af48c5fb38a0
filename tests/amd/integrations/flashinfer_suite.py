"""FlashInfer's own tests against ours: the number that pass, the number that ask for refused features, and the reasons.

    python -m tests.amd.integrations.flashinfer_suite CHECKOUT

CHECKOUT: a folder with FlashInfer's folder `tests`, which no commit here holds. The table is printed.
FLASHINFER_CASES and FLASHINFER_MOST_WORK: see flashinfer_stand_in.py.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
FILES = (
    "attention/test_batch_decode_kernels",
    "attention/test_tensor_cores_decode",
    "attention/test_non_contiguous_decode",
    "attention/test_decode_fp8_calibration_scale",
    "attention/test_batch_prefill_kernels",
    "attention/test_batch_prefill",
    "attention/test_batch_attention",
    "attention/test_non_contiguous_prefill",
    "attention/test_single_prefill",
    "attention/test_decode_prefill_lse",
    "attention/test_sliding_window",
    "attention/test_logits_cap",
    "attention/test_alibi",
    "attention/test_attention_sink",
    "attention/test_block_sparse",
    "attention/test_rope",
    "utils/test_pod_kernels",
    "utils/test_quantization",
    "utils/test_sampling",
    "attention/test_page",
    "attention/test_mla_page",
    "attention/test_shared_prefix_kernels",
    "attention/test_deepseek_mla",
)


def outcomes(checkout: Path, name: str) -> dict[str, Any]:
    """Runs the cases of a file, folder/name, in a separate process and returns their results."""
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "outcomes.json"
        path = os.pathsep.join(map(str, (checkout, Path(__file__).parent, ROOT, os.environ.get("PYTHONPATH", ""))))
        environment = {**os.environ, "PYTHONPATH": path, "FLASHINFER_OUTCOMES": str(written)}
        options = ["-p", "flashinfer_stand_in", "--noconftest", "-p", "no:cacheprovider", "-q", "-c", os.devnull]
        finished = subprocess.run(
            [sys.executable, "-m", "pytest", *options, f"--rootdir={checkout}", f"tests/{name}.py"],
            cwd=checkout,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if not written.exists():
            raise RuntimeError(f"{name} did not run:\n{finished.stdout[-2000:]}{finished.stderr[-2000:]}")
        found: dict[str, Any] = json.loads(written.read_text())
    return found


def line(name: str, found: dict[str, Any]) -> str:
    counts = Counter(each["outcome"] for each in found["outcomes"])
    why = Counter(_short(each) for each in found["outcomes"] if each["outcome"] != "passed")
    reasons = "; ".join(f"{reason} ({count})" for reason, count in why.most_common())
    cells = [counts[each] for each in ("passed", "refused", "skipped", "failed")]
    head = f"| `{Path(name).name}` | {found['cases']} | {len(found['outcomes'])}"
    return f"{head} | {' | '.join(map(str, cells))} | {reasons} |"


def _short(each: dict[str, str]) -> str:
    """Returns a reason without the parts that differ from case to case."""
    why = re.sub(r"\s+", " ", each["why"]).replace("|", "/")
    why = why.partition(": ")[0] if each["outcome"] == "refused" else why[:100]
    return why[:80]


def print_table(checkout: Path) -> None:
    print("| file | cases | run | pass | refused | skipped | fail | what was refused, skipped or failed |")
    print("|---" * 8 + "|")
    for name in FILES:
        print(line(name, outcomes(checkout, name)), flush=True)


if __name__ == "__main__":
    print_table(Path(sys.argv[1]).resolve())
