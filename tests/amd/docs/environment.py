"""The page of environment variables, generated from the code: python -m tests.amd.docs.environment writes it."""

from __future__ import annotations

from rocm_attn.machine.aiter_switches import SWITCHES
from rocm_attn.machine.settings import VARIABLES
from tests.amd.docs.pages import DOCS

PAGE = DOCS / "environment.md"

_HEAD = """# Environment variables

`rocm-attn doctor` names a variable that is misspelt, has a wrong value or makes things slow. `python -m
tests.amd.docs.environment` writes this page from the code; a test holds that it is current.

## One GPU of eight

ROCm numbers the GPUs of a machine from 0. One variable selects those that a process sees, and their numbers begin
anew at 0 in it:

```text
HIP_VISIBLE_DEVICES=3 rocm-attn serve --model ./Llama-3.1-8B-Instruct --device cuda       # one GPU, the fourth
HIP_VISIBLE_DEVICES=4,5,6,7 rocm-attn serve --model ./Llama-3.1-70B-Instruct --tp 4       # the second half
```

* Use `HIP_VISIBLE_DEVICES` alone. `CUDA_VISIBLE_DEVICES` works on ROCm too, but libraries disagree about which of the
  two counts when they differ.
* `ROCR_VISIBLE_DEVICES` hides GPUs below HIP: `HIP_VISIBLE_DEVICES` then counts among those that are left. It takes
  UUIDs too (`rocminfo` prints them), which do not change when a GPU is lost.
* On NVIDIA GPUs use `CUDA_VISIBLE_DEVICES`.
* In Docker, pass one render node in place of all of `/dev/dri`: `--device=/dev/kfd --device=/dev/dri/renderD131`. The
  container then sees one GPU, whatever variables say. `ls -l /dev/dri/by-path` tells which node is which GPU.
* On Kubernetes the device plugin chooses: `amd.com/gpu: 1`.
* Eight servers with a GPU each: start each with its own number and its own `--port`, and let them share the cache
  folder. [Scale out](scale.md) puts a gateway before them.

## Variables of this project

| variable | read by | values | not set | effect |
|---|---|---|---|---|
"""

_CACHES = """
## Where compiled code is kept

| variable | effect |
|---|---|
| `TRITON_CACHE_DIR` | the folder of Triton's compiled kernels; `~/.triton/cache` otherwise |
| `AITER_JIT_DIR` | the folder of AITER's compiled modules; its package or `~/.aiter/jit` otherwise |
| `XDG_CACHE_HOME` | the folder of measured tiles and of the probe's verdicts; `~/.cache` otherwise |

Keep these on a local disk, writable for the user who serves. `rocm-attn prewarm` fills the first two.

## Variables of AITER that change its kernels

The doctor shows those that are set, and [the probe](providers.md#the-probe) runs again for each set of values.

| variable | read since | it | here |
|---|---|---|---|
"""


def page() -> str:
    """Returns the text of docs/environment.md."""
    ours = [f"| `{each.name}` | {each.read_by} | {each.values} | {each.unset} | {each.effect} |" for each in VARIABLES]
    aiters = [f"| `{each.name}` | {each.since} | {each.changes} | {each.verdict} |" for each in SWITCHES]
    return _HEAD + "\n".join(ours) + "\n" + _CACHES + "\n".join(aiters) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
