"""Host time of one eager decode step, from its StepBatch to the last layer's launch, for an attention-only model.

python -m rocm_lab.benchmarks.eager_step --out rocm_lab/benchmarks/results/eager_step.json

This is the time that a graph saves. The device is idle at each start, so that no wait for it is counted; the first
decile of many steps is the host's time without disturbance.
"""

from __future__ import annotations

from rocm_lab.benchmarks.host_time import measure
from rocm_lab.benchmarks.script import parser_of, printed, write

# A server's length: if no sequence may be long, the launches of a layer are fewer.
MAX_KV_LEN = 1 << 17


def main() -> None:
    """Measures batches of three sizes."""
    options = parser_of(__doc__).parse_args()
    rows = (measure(num_seqs, is_graph=False, max_kv_len=MAX_KV_LEN) for num_seqs in (1, 64, 256))
    write(options.out, rows=printed(rows))


if __name__ == "__main__":
    main()
