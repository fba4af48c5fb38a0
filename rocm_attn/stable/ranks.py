"""Agreement of ranks: stable names, as `ra.ranks`."""

# isort: off

# Agreement of ranks
from rocm_attn.machine.agreement import Agreement as Agreement
from rocm_attn.machine.agreement import RanksDiverged as RanksDiverged
from rocm_attn.machine.agreement import alone as alone
from rocm_attn.machine.agreement import among as among
